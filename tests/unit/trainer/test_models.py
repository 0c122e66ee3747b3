"""The order of a rank's allocations is the memory plan's: the KV cache is sized when all else is there."""

from __future__ import annotations

import shutil
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from megatron_tlt.checkpoint.convert.to_megatron import MegatronConversion
from megatron_tlt.config.load import build_config
from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.distributed.together import SingleProcess
from megatron_tlt.drafters.checkpoint import save_drafter
from megatron_tlt.drafters.eagle.config import EagleConfig
from megatron_tlt.drafters.training.sharing import HiddenStateSharing
from megatron_tlt.models.hf.writer import save_hf
from megatron_tlt.trainer import models
from tests.helpers.tiny_drafters import DEEP, random_drafter
from tests.helpers.tiny_models import random_weights


def test_collectives_of_an_engine_have_the_configured_timeout(monkeypatch):
    made = []
    monkeypatch.setattr(models.dist, "new_group", lambda ranks, **options: made.append((ranks, options)) or ranks)
    monkeypatch.setattr(models, "GroupTensorParallel", lambda group: group)
    assert models.tensor_parallel(SimpleNamespace(rank=2, size=4, timeout_s=7.5), 2) == [2, 3]
    limit = {"timeout": timedelta(seconds=7.5)}
    assert made == [([0, 1], limit), ([2, 3], limit)]


@pytest.mark.parametrize("drafter", ["eagle", "eagle3", "dspark"])
def test_a_new_drafter_starts_from_the_policy_of_a_megatron_checkpoint(tmp_path, drafter):
    save_hf(tmp_path / "hf", DEEP["qwen2"], random_weights(DEEP["qwen2"]))
    MegatronConversion.plan(tmp_path / "hf", None).write(tmp_path / "mg", SingleProcess())
    (tmp_path / "bare").mkdir()
    shutil.copy(tmp_path / "hf/config.json", tmp_path / "bare")
    sources = {"path": str(tmp_path / "hf")}, {"path": str(tmp_path / "bare"), "megatron_path": str(tmp_path / "mg")}
    trees = [{"model": model, "rollout": {"speculation": {"drafter": drafter}}} for model in sources]
    wanted, found = (models._starting_drafter(build_config(tree)).state_dict() for tree in trees)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("is_new", [True, False])
def test_a_new_drafter_has_start_lr_and_chooses_its_vocabulary(tmp_path, is_new):
    """A configured one has neither; both are trained for the run's temperature."""
    save_hf(tmp_path / "hf", DEEP["qwen2"], random_weights(DEEP["qwen2"]))
    shape = EagleConfig.of(DEEP["qwen2"], 30)
    save_drafter(tmp_path / "drafter", shape, random_drafter(shape))
    which = {"draft_vocab_size": 30} if is_new else {"drafter_path": str(tmp_path / "drafter")}
    rollout = {"temperature": 0.7, "speculation": {"drafter": "eagle", **which}}
    model = {"path": str(tmp_path / "hf")}
    config = build_config({"model": model, "rollout": rollout, "idle": {"train_drafter": True}})
    world = SimpleNamespace(device=torch.device("cpu"), rank=0, size=1)
    made = models._drafter_trainer(config, world, TensorParallel(), HiddenStateSharing())
    assert made._trainer._temperature == 0.7
    assert made._extra_lr == pytest.approx(9.0 if is_new else 0.0) and made._awaits_vocabulary == is_new


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_kv_cache_is_sized_after_policy_drafter_and_communicators(monkeypatch, device):
    done = []

    def part(name, result=None):
        def build(*arguments, **options):
            done.append((name, options))
            return result

        return build

    policy, trainer = SimpleNamespace(communicating=lambda: ["tp"]), object()
    monkeypatch.setattr(models, "_policy", part("policy", policy))
    monkeypatch.setattr(models, "_drafter_trainer", part("drafter", trainer))
    monkeypatch.setattr(models.device_memory, "open_communicators", part("communicators"))
    monkeypatch.setattr(models.device_memory, "cache_bytes", part("size", 7))
    monkeypatch.setattr(models, "open_backend", part("engine", "backend"))
    config, world = build_config({"model": {"path": "m"}}), SimpleNamespace(device=torch.device(device), rank=0, size=1)
    assert models.build_models(config, world, None, None, None) == (policy, trainer, "backend")
    order = ["policy", "drafter", "communicators", "size", "engine"]
    assert [name for name, _ in done] == [name for name in order if device == "cuda" or name != "communicators"]
    assert done[-1][1]["kv_cache_bytes"] == 7, "the engine gets the cache of that size"
