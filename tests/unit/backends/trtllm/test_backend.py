"""The client and the server of TensorRT-LLM engines, in two real processes, around a toy engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.backends import remote_weights
from megatron_tlt.backends.trtllm.backend import TrtllmBackend
from megatron_tlt.backends.trtllm.server import new_totals
from megatron_tlt.errors import BackendError, SyncError
from megatron_tlt.sync.buckets import checksum
from megatron_tlt.types import GenerateCall, Prompt, SamplingParams
from tests.helpers.trtllm_engines import DRAFTER, PROMPTS, push, start_backend, tensors
from tests.helpers.trtllm_toy import ENDLESS, REFUSED

PARAMS = SamplingParams(max_tokens=12)
EAGLE: dict[str, Any] = {"eagle": True, "draft_len": 3}


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrtllmBackend]:
    """One engine for the tests that leave it well; of another version in tests/integration/test_backends.py."""
    started = start_backend(tmp_path_factory.mktemp("engine"), **EAGLE)
    yield started
    started.close()


def test_steps_and_drafts_are_counted_by_the_engine(backend: TrtllmBackend) -> None:
    push(backend, 3)
    backend.take_stats()
    samples, stats = backend.generate(GenerateCall(PROMPTS, PARAMS, 6)), backend.take_stats()
    # The toy's drafter: three drafted and one accepted in each step.
    assert stats.steps == sum(-(-len(s.token_ids) // 2) for s in samples)
    assert stats.speculation.row_steps == stats.steps
    assert stats.speculation.drafted_tokens == 3 * stats.steps
    assert stats.speculation.accept_length == 2.0
    assert backend.take_stats().steps == 0
    assert backend._asleep, "memory is given back between rollouts"


def test_statistics_that_are_empty_are_a_warning_once(
    backend: TrtllmBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of TensorRT-LLM's Ray executor; not where nothing was generated."""
    monkeypatch.setattr(backend.process, "call", lambda kind: {"totals": new_totals(), "error": None})
    monkeypatch.setattr(backend, "_warned", False)
    for tokens, warnings in ((0, 0), (7, 1), (7, 1)):
        backend._stats.generated_tokens = tokens
        assert backend.take_stats().steps == 0
        assert len(caplog.messages) == warnings
    assert "counts of steps and drafts are incomplete, or 0: get_stats is empty" in caplog.text


def test_a_drafter_that_arrives_with_other_bytes_is_refused(
    backend: TrtllmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_weights, "checksum", lambda tensor: 0)
    with pytest.raises(SyncError, match="other bytes of the drafter than version 20 has"):
        push(backend, 20, drafter=tensors(DRAFTER, 1))
    with pytest.raises(BackendError, match="torn"):
        backend.generate(GenerateCall(PROMPTS, PARAMS, 1))
    push(backend, 21)


def test_a_refused_request_leaves_nothing_behind(backend: TrtllmBackend) -> None:
    push(backend, 18)
    refused, endless = Prompt(1, "q", (REFUSED,), ""), Prompt(9, "q9", (ENDLESS,), "")
    message = "could not generate a response to prompt 1: ValueError: this prompt is refused"
    with pytest.raises(BackendError, match=message):
        backend.generate(GenerateCall([*PROMPTS, endless, refused], PARAMS, 2))
    assert len(backend.generate(GenerateCall(PROMPTS, PARAMS, 2))) == 4


def test_weights_go_through_shared_memory_and_close_leaves_nothing(tmp_path: Path) -> None:
    backend = start_backend(tmp_path, **EAGLE)
    weights = push(backend, 1, drafter=tensors(DRAFTER, 1))
    assert backend.weight_checksums() == {n: checksum(t) for n, t in weights.items()}, "norm.weight is the policy's"
    folder, pid = backend.process.shared.path, backend.process.pid
    assert {path.name for path in folder.iterdir()} == {"socket", "tlt_backends"}, "nothing of a weight sync"
    assert folder.stat().st_mode & 0o777 == 0o700
    backend.close()
    backend.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not folder.exists()
    with pytest.raises(BackendError, match="closed"):
        backend.generate(GenerateCall(PROMPTS, PARAMS, 1))


def test_an_engine_without_a_drafter_refuses_one_and_its_death_is_reported(tmp_path: Path) -> None:
    plain = start_backend(tmp_path)
    plain.begin_update(1)
    with pytest.raises(SyncError, match="engine that has none"):
        plain.update_drafter(tensors(DRAFTER, 0), 1)
    with pytest.raises(BackendError, match="no drafter in its model"):
        plain._send("drafter", list(tensors(DRAFTER, 0).items()))
    push(plain, 2)
    pid = plain.process.pid
    with pytest.raises(BackendError, match=rf"process {pid}\) was ended by signal 9.*log"):
        plain.generate(
            GenerateCall([Prompt(9, "q9", (ENDLESS,), "")], PARAMS, 1, lambda *_: os.kill(pid, signal.SIGKILL))
        )
    with pytest.raises(BackendError, match="killed or closed"):
        plain.generate(GenerateCall(PROMPTS, PARAMS, 1))
    plain.close()
