"""The parts of a run as its configuration has them on each rank."""

import os
from datetime import date
from types import SimpleNamespace

import pytest
import torch

from megatron_tlt.actor import train_step
from megatron_tlt.config.load import build_config, load_config
from megatron_tlt.config.planning.parameters import GIB
from megatron_tlt.config.root import SftConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.rewards.pool import RewardPool
from megatron_tlt.trainer import device_memory, setup
from tests.helpers.checked_configs import world_of
from tests.helpers.mpi import ROOT


@pytest.mark.parametrize(("rank", "is_first"), [(0, True), (1, False), (4, True), (7, False)])
def test_the_rank_that_judges_an_engine_s_responses_has_the_workers_and_cpus_of_all(monkeypatch, rank, is_first):
    started = []
    monkeypatch.setattr(
        RewardPool, "warm_up", lambda pool: started.append((pool._section.workers, pool._new_worker.args[-1]))
    )
    config = build_config({"model": {"path": "m"}, "rollout": {"tp": 4}, "rewards": {"workers": 2}})
    bound = [{of_rank} for of_rank in range(8)]
    world = SimpleNamespace(rank=rank, size=8, heartbeat=lambda: None, all_gather_object=lambda mine: bound)
    setup.reward_pool(config, world).close()
    assert started == [(8, {*range(rank, rank + 4)})] * is_first


@pytest.fixture
def determinism(monkeypatch):
    """What a run sets for its whole process, as it was."""
    mode = torch.get_deterministic_debug_mode()
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_deterministic_debug_mode(mode)


@pytest.mark.parametrize(
    ("device", "asked", "strict"), [("cuda", True, True), ("cuda", "auto", False), ("cpu", "auto", True)]
)
def test_a_deterministic_update_has_no_operation_that_only_warns(determinism, monkeypatch, device, asked, strict):
    """Where it may warn, PyTorch's fused attention takes atomic operations; cuBLAS needs its variable, too."""
    monkeypatch.setattr(setup, "lock_run_dir", lambda *_: None)
    world = SimpleNamespace(device=torch.device(device), rank=0, size=1, set_monitor=lambda start: None)
    setup._prepare(build_config({"model": {"path": "m"}, "train": {"deterministic": asked}}), world)
    modes = []
    monkeypatch.setattr(train_step, "_run", lambda *_, **__: modes.append(torch.get_deterministic_debug_mode()))
    train_step.accumulate_gradients(None, None, [], None, 1.0, 1.0)
    assert modes == [2 * strict] and torch.get_deterministic_debug_mode() == 1 * strict
    on_cuda = (":4096:8", "0") if device == "cuda" and strict else ("1", "1")
    assert (os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"]) == on_cuda


def test_fine_tuning_that_its_gpu_has_no_room_for_is_refused(monkeypatch, tmp_path):
    """As an RL run is, before a weight is loaded."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * GIB, 10 * GIB))
    monkeypatch.setattr(device_memory, "let_segments_grow", lambda device: None)
    shape = load_config(ROOT / "configs/models/qwen2.5-7b.yaml").model.architecture
    tree = {
        "model": {"path": str(tmp_path / "m"), "architecture": shape.model_dump()},
        "sft": {"train_path": str(tmp_path / "r.jsonl"), "out": str(tmp_path / "out")},
    }
    with pytest.raises(ConfigError) as refused:  # the model is not there, either
        setup.build_sft_trainer(SftConfig.model_validate(tree), world_of(device=torch.device("cuda")))
    (problem,) = (p for p in refused.value.problems if p.path == "cluster.memory_gib")
    assert problem.value == 10 and "in the update" in problem.allowed


def test_fine_tuning_is_checked_with_the_date_of_its_prompts(monkeypatch, tmp_path):
    """A template that shows today's date is rendered by the checks, too: on the day on which the run began."""
    tree = {"model": {"path": "m"}, "sft": {"train_path": "r.jsonl", "out": str(tmp_path)}}
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished/config.json").write_text('{"sft": {"chat_template_date": "2025-01-02"}}')
    monkeypatch.setattr(device_memory, "let_segments_grow", lambda device: None)
    monkeypatch.setattr(device_memory, "with_device_memory", lambda config, world: config)
    checked = []

    def check_on(config, *_):
        checked.append(config.sft.chat_template_date)
        raise ConfigError([])

    monkeypatch.setattr(setup, "check_on", check_on)
    world = SimpleNamespace(device=torch.device("cpu"), is_main=True, broadcast_object=lambda value: value)
    with pytest.raises(ConfigError):
        setup.build_sft_trainer(SftConfig.model_validate(tree), world)
    assert checked == [date(2025, 1, 2)]
