"""Weights that arrive in vLLM's worker."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.multiprocessing import reductions

from megatron_tlt.backends.drafting import StepDrafting
from megatron_tlt.backends.entries import DEVICE
from megatron_tlt.backends.vllm.plugin import compat, extension
from megatron_tlt.backends.vllm.plugin.extension import VllmWorkerExtension
from megatron_tlt.config.speculation import SpeculationSection


def load(monkeypatch: pytest.MonkeyPatch, device: torch.device, location: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors that vLLM's loader gets of a bucket."""
    loaded: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(compat, "load", lambda worker, model, tensors: loaded.update(tensors))
    worker = VllmWorkerExtension()
    worker.model_runner = SimpleNamespace(device=device, get_model=lambda: None)
    assert worker.tlt_update(location, verify=False) == {}
    return loaded


def test_handles_are_opened_on_an_index_and_their_tensors_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's C++ takes no `torch.device`; the sender uses its memory again."""
    sent = torch.ones(2)

    def rebuild(*arguments: Any) -> torch.Tensor:
        assert type(arguments[DEVICE]) is int and arguments[DEVICE] == 1
        return sent

    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild)
    handle = [[2], [1], 0, "float32", b"handle", 8, 0, False, b"", 0, b"", True]
    loaded = load(monkeypatch, torch.device("cuda", 1), {"ipc": {"a": handle}})
    sent.fill_(9)
    assert loaded["a"].tolist() == [1, 1]


def test_a_file_is_read_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "tensors")
    monkeypatch.setattr(torch.Tensor, "clone", lambda tensor: pytest.fail("a second copy of a bucket"))
    loaded = load(monkeypatch, torch.device("cpu"), {"file": str(tmp_path / "tensors")})
    assert loaded["a"].tolist() == [1, 1]


def test_drafts_are_measured_anew_once_a_drafter_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = VllmWorkerExtension()
    worker.tlt_drafting = StepDrafting(SpeculationSection(drafter="eagle"), torch.device("cpu"), 2048)
    worker.tlt_drafting._selector._is_new = False  # type: ignore[attr-defined]
    worker.model_runner = SimpleNamespace(device=torch.device("cpu"))
    for name in ("begin_reload", "end_reload", "load", "draft_model"):
        monkeypatch.setattr(compat, name, lambda *_, **__: object())
    monkeypatch.setattr(extension, "load_tensors", lambda *_: {})
    assert not worker.tlt_drafting._selector._is_new  # type: ignore[attr-defined]
    worker.tlt_update_drafter({}, verify=False)
    assert worker.tlt_drafting._selector._is_new  # type: ignore[attr-defined]


def test_the_bandit_explores_anew_with_each_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, section = VllmWorkerExtension(), SpeculationSection(drafter="suffix", selector="beg_mab")
    worker.tlt_drafting = StepDrafting(section, torch.device("cpu"), 2048)
    worker.tlt_drafting._selector._steps = [9, 9, 9, 9]  # type: ignore[attr-defined]
    worker.model_runner = SimpleNamespace(get_model=lambda: None)
    monkeypatch.setattr(compat, "end_reload", lambda *_, **__: None)
    worker.tlt_finish_update()
    assert worker.tlt_drafting._selector._steps == [0, 0, 0, 0]  # type: ignore[attr-defined]
