"""From settings to a started engine; errors are found before or instead of a start, and leave no process."""

from __future__ import annotations

import json
import types
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_tlt.backends import devices
from megatron_tlt.backends.devices import visible_device
from megatron_tlt.backends.options import EngineOptions
from megatron_tlt.backends.trtllm import build as trtllm_build
from megatron_tlt.backends.trtllm import launch as trtllm_launch
from megatron_tlt.backends.trtllm.build import build_backend
from megatron_tlt.config.load import build_config
from megatron_tlt.config.model import ModelSection
from megatron_tlt.config.rollout import RolloutSection, SyncSection
from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.drafters.base import SavedDrafter
from megatron_tlt.drafters.eagle.config import Eagle3Config
from megatron_tlt.errors import BackendError, ConfigError
from megatron_tlt.observe.gpu import index_of
from megatron_tlt.trainer.preflight import missing_files
from megatron_tlt.types import WeightBucket
from megatron_tlt.workers.scratch import OF_MACHINE, sweep_scratch
from tests.helpers.tiny_drafters import random_drafter
from tests.helpers.tiny_models import TINY
from tests.helpers.trtllm_engines import fake_python


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every process that is started."""
    processes: list[Any] = []
    real = trtllm_build.EngineProcess
    monkeypatch.setattr(trtllm_build, "EngineProcess", lambda *a: processes.append(real(*a)) or processes[-1])
    return processes


def settings(folder: Path, **fields: Any) -> tuple[RolloutSection, ModelSection]:
    (folder / "config.json").write_text(json.dumps(TINY.to_hf()))
    given = {"python": fake_python(folder), **fields}
    rollout = RolloutSection.model_validate({"backend": "trtllm", "trtllm": given})
    return rollout, ModelSection(path=str(folder), max_context=64)


def test_an_error_is_reported_and_of_a_failed_start_the_log_stays(
    tmp_path: Path, logs: Path, started: list[Any]
) -> None:
    options = EngineOptions(*settings(tmp_path, engine={"max_inputs": 3}), SyncSection(), device="cpu")
    with pytest.raises(BackendError, match="unexpected argument 'max_inputs'") as caught:
        build_backend(options)
    assert not any(process.is_alive or process.shared.path.exists() for process in started)
    (log,) = logs.iterdir()
    assert f"the end of its log ({log}):\n" in str(caught.value)
    assert "Traceback" in str(caught.value) and "Traceback" in log.read_text()
    log.unlink()


@pytest.mark.parametrize(("sleeps", "called"), [(False, ["start"]), (True, ["start", "release"])])
def test_it_starts_with_the_drafter_in_its_own_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeps: bool, called: list[str]
) -> None:
    """Tensors and config.json that EAGLE-3's loader reads, the layers as an argument; each weight sync brings all
    tensors. An engine that sleeps has given its cache back."""
    shape, seen, calls = Eagle3Config.of(replace(TINY, num_layers=4), (0, 1, 2), 20), {}, []
    drafter = SavedDrafter(shape, random_drafter(shape))
    real = trtllm_build.EngineProcess.call

    def call(self: Any, kind: str, **fields: Any) -> Any:
        calls.append(kind)
        if kind == "start":
            given = fields["llm"]["speculative_config"]
            folder = Path(given["speculative_model"])
            is_swept = folder.parent.name.startswith(OF_MACHINE) and not sweep_scratch(tmp_path / "none", young_s=-1)
            seen.update(given, is_swept=is_swept, tensors=load_file(folder / "model.safetensors"))
            seen.update(architectures=json.loads((folder / "config.json").read_text())["architectures"])
        return real(self, kind, **fields)

    monkeypatch.setattr(trtllm_build.EngineProcess, "call", call)
    rollout, model = settings(tmp_path)
    changes = {"speculation": SpeculationSection(drafter="eagle", draft_len=3), "release_cache": sleeps}
    rollout = rollout.model_copy(update=changes)
    backend = build_backend(EngineOptions(rollout, model, SyncSection(verify=True), device="cpu", drafter=drafter))
    assert calls == called and backend.policy_version == -1
    assert seen["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (seen["eagle3_layers_to_capture"], seen["max_draft_len"]) == ([0, 1, 2], 3)
    assert seen["tensors"].keys() == drafter.weights.keys() >= {"lm_head.weight", "d2t", "t2d"}
    assert seen["is_swept"], "after a kill, not while it reads"
    assert not Path(seen["speculative_model"]).exists(), "it has read it"
    backend.begin_update(1)
    backend.update_weights(WeightBucket(1, [(n, torch.zeros(s)) for n, s in TINY.parameter_shapes().items()]))
    backend.update_drafter(drafter.weights, 1)
    backend.finish_update()
    assert backend.policy_version == 1
    backend.close()


def test_an_engine_that_does_not_give_its_cache_back_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[Any]
) -> None:
    def refuse(self: Any) -> None:
        raise BackendError("refused")

    monkeypatch.setattr(trtllm_build.TrtllmBackend, "release", refuse)
    rollout, model = settings(tmp_path)
    rollout = rollout.model_copy(update={"release_cache": True})
    with pytest.raises(BackendError, match="refused"):
        build_backend(EngineOptions(rollout, model, SyncSection(), device="cpu"))
    assert started and not any(process.is_alive for process in started)


@pytest.mark.parametrize(
    ("ours", "device", "theirs"),
    [(None, "cuda:2", "2"), ("GPU-ab,4", "cuda:1", "4"), ("4, 6", "cuda:1", "6"), ("4", "cpu", None)],
)
def test_the_engine_sees_the_ranks_gpu(
    monkeypatch: pytest.MonkeyPatch, ours: str | None, device: str, theirs: str | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if ours is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ours)
    assert visible_device(torch.device(device), "trtllm") == (
        {} if theirs is None else {"CUDA_VISIBLE_DEVICES": theirs}
    )


def test_a_uuid_becomes_an_index_for_the_engine_takes_names_for_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    uuids = ["GPU-00aa-1", "GPU-00bb-2", "GPU-00ba-3"]
    nvml = types.SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(uuids),
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetUUID=lambda handle: uuids[handle],
    )
    monkeypatch.setattr(devices, "index_of", partial(index_of, nvml=nvml))
    for name, index in (("GPU-00ba-3", "2"), ("GPU-00bb", "1")):  # CUDA takes a beginning of a UUID, too
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"0,{name}")
        wanted = {"CUDA_VISIBLE_DEVICES": index, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        assert visible_device(torch.device("cuda:1"), "trtllm") == wanted
    for name, why in (("GPU-00b", "2 GPUs"), ("GPU-ff", "0 GPUs"), ("MIG-00aa", "no GPU's UUID")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", name)
        with pytest.raises(ConfigError, match=why) as raised:
            visible_device(torch.device("cuda:0"), "vllm")
        assert str(raised.value).startswith("rollout.backend = 'vllm': ") and repr(name) in str(raised.value)


def test_a_python_or_drafter_that_is_not_there_is_found_before_the_start(tmp_path: Path) -> None:
    rollout = {"backend": "trtllm", "trtllm": {"python": "/no/python"}}
    rollout |= {"speculation": {"drafter": "eagle", "drafter_path": "/no/drafter"}}
    paths = {p.path for p in missing_files(build_config({"model": {"path": str(tmp_path)}, "rollout": rollout}))}
    assert {"rollout.trtllm.python", "rollout.speculation.drafter_path"} <= paths


@pytest.mark.parametrize(
    ("version", "is_known"),
    [
        *((version, True) for version in ("1.2.1", "1.3.0rc27", "1.2.1.post1")),
        *((version, False) for version in ("1.4.0", "1.2", "x1.2.1", "1.20.0")),
    ],
)
def test_versions_whose_names_are_recorded(version: str, is_known: bool) -> None:
    assert (trtllm_launch._VERSIONS.fullmatch(version) is not None) == is_known
