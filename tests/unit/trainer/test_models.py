"""The order of a rank's allocations is the memory plan's: the KV cache is sized when all else is there."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from megatron_tlt.config.load import build_config
from megatron_tlt.trainer import models


def test_collectives_of_an_engine_have_the_configured_timeout(monkeypatch):
    made = []
    monkeypatch.setattr(models.dist, "new_group", lambda ranks, **options: made.append((ranks, options)) or ranks)
    monkeypatch.setattr(models, "GroupTensorParallel", lambda group: group)
    assert models.tensor_parallel(SimpleNamespace(rank=2, size=4, timeout_s=7.5), 2) == [2, 3]
    limit = {"timeout": timedelta(seconds=7.5)}
    assert made == [([0, 1], limit), ([2, 3], limit)]


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
