from __future__ import annotations

import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_tlt.backends import remote_weights
from megatron_tlt.backends.options import EngineOptions
from megatron_tlt.backends.vllm.backend import VllmBackend
from megatron_tlt.config.engine_process import VllmSection
from megatron_tlt.config.model import ModelSection
from megatron_tlt.config.rollout import RolloutSection, SyncSection
from megatron_tlt.errors import BackendError, SyncError
from megatron_tlt.models.hf.config import EMBED, HEAD
from megatron_tlt.sync.served_weights import ServedWeights
from megatron_tlt.types import GenerateCall, Prompt, SamplingParams, WeightBucket

MODEL = ModelSection(path="/model", max_context=8)


def test_kept_tables_are_copied_in_place_from_the_second_push_on(monkeypatch: pytest.MonkeyPatch) -> None:
    process = SimpleNamespace(launch=SimpleNamespace(name="vLLM"))
    weights = ServedWeights({EMBED: (5, 2), HEAD: (5, 2)}, (), False)
    rollout = RolloutSection(dtype="bf16")
    backend = VllmBackend(process, weights, EngineOptions(rollout, MODEL, keep_tables=True))
    monkeypatch.setattr(backend, "_send", lambda kind, tensors: {})
    addresses = set()
    for version in (0, 1):
        pushed = {name: torch.full((5, 2), version + i / 2) for i, name in enumerate((EMBED, HEAD))}
        weights.begin(version)
        backend.update_weights(WeightBucket(version, list(pushed.items())))
        weights.commit()
        tables = backend.lookup_tables()
        for table, tensor in zip(tables, pushed.values(), strict=True):
            assert table.dtype == torch.bfloat16 and torch.equal(table.float(), tensor)
        addresses.add(tuple(table.data_ptr() for table in tables))
        pushed[EMBED].fill_(9)  # the sender's buffer is used again
    assert len(addresses) == 1 and tables[0].eq(1).all()


class ToyProcess:
    """An engine's process that ends the oldest request first; a response's token is its key's last digits."""

    launch = SimpleNamespace(name="vLLM")
    is_alive = True

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.responses: list[dict[str, Any]] = []
        self.hidden: bool | None = None

    def send(self, message: dict[str, Any]) -> None:
        self.requests.append(message)

    def next_response(self, wait_s: float | None = None) -> dict[str, Any]:
        request = self.requests.pop(0)
        tokens = [request["key"] % 1000]
        self.hidden = request["params"]["hidden"]
        return {"type": "response", "id": request["id"], "token_ids": tokens, "finish_reason": "length"}


def toy_backend(process: ToyProcess, most: int) -> tuple[VllmBackend, ToyProcess]:
    """A backend with weights, whose engine holds so many requests at a time."""
    weights = ServedWeights({EMBED: (5, 2)}, (), False)
    weights.begin(0)
    weights.accept(WeightBucket(0, [(EMBED, torch.zeros(5, 2))]))
    weights.commit()
    rollout = RolloutSection(max_running_requests=most)
    drafter = SimpleNamespace(weights={"fc.weight": torch.zeros(2)})
    return VllmBackend(process, weights, EngineOptions(rollout, MODEL, drafter=drafter)), process  # type: ignore[arg-type]


def test_a_request_longer_than_the_engine_was_made_for_is_refused() -> None:
    weights, longest = toy_backend(ToyProcess(), 2)[0]._weights, 5
    options = EngineOptions(RolloutSection(), MODEL, longest_request=longest)
    backend = VllmBackend(ToyProcess(), weights, options)  # type: ignore[arg-type]
    with pytest.raises(BackendError, match="6 tokens exceed the context of 5"):
        backend.generate(GenerateCall([Prompt(0, "q", (1, 2), "?")], SamplingParams(max_tokens=4), 1))


def test_an_end_of_an_unknown_kind_ends_the_rollout() -> None:
    """What an interrupted one leaves: test_turns.py and ../test_pre_rollouts.py."""
    backend, process = toy_backend(ToyProcess(), 2)
    response = process.next_response
    process.next_response = lambda wait_s=None: response() | {"finish_reason": "unknown"}  # type: ignore[method-assign]
    process.call = lambda kind, patience: process.requests.clear()  # type: ignore[attr-defined]
    with pytest.raises(BackendError):
        backend.generate(GenerateCall([Prompt(0, "q", (1, 2), "?")], SamplingParams(max_tokens=4), 9))
    assert not process.requests and not process.responses


def test_an_engine_without_the_requests_that_wait_ends_the_rollout() -> None:
    """Not at heartbeats of before the last request was read, nor at one that a response may follow."""
    backend, process = toy_backend(ToyProcess(), 2)
    response, beat = process.next_response, {"type": "beat", "lengths": [], "in_flight": 0}
    process.failure = BackendError  # type: ignore[attr-defined]
    old = [{**beat, "last_request": 1}] * 3
    seen: list[Any] = [*old, {**beat, "last_request": 2}, response, {**beat, "last_request": 3}, response, response]
    last: list[Any] = [*old, *[{**beat, "last_request": 6}] * 2]

    def play(messages: list[Any], num_samples: int) -> None:
        left = iter(messages)
        process.next_response = lambda wait_s=None: m() if callable(m := next(left)) else m  # type: ignore[method-assign]
        backend.generate(GenerateCall([Prompt(0, "q", (1, 2), "?")], SamplingParams(max_tokens=4), num_samples))

    play(seen, 3)
    assert process.hidden is False, "without a sink no hidden states are kept"
    backend.collect_hidden_states(lambda sample: None)
    play([response], 1)
    assert process.hidden is True
    process.call = lambda kind, patience: None  # type: ignore[attr-defined]
    with pytest.raises(BackendError, match="has no requests, but 2 wait"):
        play(last, 2)


def test_a_push_that_fails_at_its_end_keeps_no_copy_of_the_drafter() -> None:
    backend, process = toy_backend(ToyProcess(), 2)
    process.call = lambda kind: None  # type: ignore[attr-defined]
    backend.begin_update(1)
    copy = torch.ones(2)
    gone = weakref.ref(copy)
    backend.update_drafter({"fc.weight": copy}, 1)
    del copy
    with pytest.raises(SyncError):
        backend.finish_update()
    assert gone() is None


def test_tensors_that_fail_leave_no_file(tmp_path: Path) -> None:
    backend, process = toy_backend(ToyProcess(), 2)
    settings = VllmSection()  # auto: shared memory on CPU
    process.launch, process.shared = SimpleNamespace(settings=settings), SimpleNamespace(path=tmp_path)  # type: ignore[attr-defined,assignment]

    def call(kind: str, tensors: dict[str, str], verify: bool) -> None:
        assert load_file(tensors["file"])["fc.weight"].eq(1).all()
        raise BackendError(f"vLLM could not {kind}")

    process.call = call  # type: ignore[attr-defined]
    with pytest.raises(BackendError, match="could not drafter"):
        backend._send("drafter", [("fc.weight", torch.ones(2))])
    assert list(tmp_path.iterdir()) == []


class SleepingProcess(ToyProcess):
    """Notes the order of its calls, and of rollouts as "submit"."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def send(self, message: dict[str, Any]) -> None:
        super().send(message)
        self.calls.append("submit")

    def call(self, kind: str, tags: list[str] | None = None, patience: float | None = None) -> None:
        self.calls.append(kind if tags is None else (kind, *tags))


@pytest.mark.parametrize("sleeps", [True, False])
def test_memory_is_there_for_rollouts_and_weight_syncs_only(monkeypatch: pytest.MonkeyPatch, sleeps: bool) -> None:
    """A step with two rounds of rollouts, one that evaluates without an update between, one interrupted."""
    emptied: list[None] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(None))
    process = SleepingProcess()
    weights = ServedWeights({EMBED: (5, 2)}, (), False)
    rollout = RolloutSection(backend="vllm", release_cache=sleeps)
    backend = VllmBackend(process, weights, EngineOptions(rollout, MODEL, device="cuda"))
    monkeypatch.setattr(backend, "_send", lambda kind, tensors: {})
    backend.release()  # as `build_backend` does

    def sync(version: int) -> None:
        backend.begin_update(version)
        backend.update_weights(WeightBucket(version, [(EMBED, torch.zeros(5, 2))]))
        backend.finish_update()

    def generate(on_progress: Any = None) -> None:
        call = GenerateCall([Prompt(0, "q", (1, 2), "?")], SamplingParams(max_tokens=4), 1, on_progress)
        backend.generate(call)

    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    sync(0)
    generate()
    generate()
    backend.release_weights()
    backend.release_weights()
    sync(1)
    with pytest.raises(KeyboardInterrupt):
        generate(interrupt)
    sync(2)
    with pytest.raises(KeyboardInterrupt):
        generate(interrupt)
    backend.release_weights()
    sync(3)
    generate()
    one_sync, rollout_of = ["begin_update", "finish_update"], ["submit"]
    if sleeps:
        rollout_of = [("wake", "kv_cache"), "submit", "sleep_cache"]
    update = ["sleep_weights", ("wake", "weights")] if sleeps else []
    expected = [*one_sync, *rollout_of, *rollout_of, *update, *one_sync]
    expected += [*rollout_of, *one_sync]  # the interrupted rollout's cache is released before the sync
    expected += [*rollout_of[:2], *update, *one_sync, *rollout_of]
    assert process.calls == (["sleep_cache"] if sleeps else []) + expected
    assert len(emptied) == sum(call[0] == "wake" for call in process.calls)


def test_progress_of_a_shared_engine_is_called_at_the_same_steps_on_all_ranks() -> None:
    """Heartbeats that each process sends by its own clock count for liveness only."""
    weights = toy_backend(ToyProcess(), 2)[0]._weights
    tp = SimpleNamespace(size=2)
    seen: list[list[int]] = []
    for beats in (1, 3):
        process = ToyProcess()
        options = EngineOptions(RolloutSection(max_running_requests=2), MODEL, tp=tp)  # type: ignore[arg-type]
        backend = VllmBackend(process, weights, options)
        response = process.next_response
        own = {"type": "beat", "lengths": [1], "in_flight": 2, "last_request": 2}
        left = iter([*[own] * beats, response, {"type": "beat", "lengths": [2], "in_step": True}, response])
        process.next_response = lambda wait_s=None: m() if callable(m := next(left)) else m  # type: ignore[method-assign]  # noqa: B023
        calls: list[int] = []
        prompts = [Prompt(0, "q", (1, 2), "?")]
        backend.generate(GenerateCall(prompts, SamplingParams(max_tokens=4), 2, lambda *of: calls.append(of[0])))  # noqa: B023
        seen.append(calls)
    assert seen == [[1, 1, 0]] * 2


@pytest.mark.parametrize(
    ("transport", "device", "used"),
    [
        ("auto", "cpu", "in_shared_memory"),
        ("auto", "cuda", "by_cuda_ipc"),
        ("shared_memory", "cuda", "in_shared_memory"),
    ],
)
def test_weights_go_by_handles_on_gpus(monkeypatch: pytest.MonkeyPatch, transport: Any, device: str, used: str) -> None:
    seen: list[str] = []
    for name in ("in_shared_memory", "by_cuda_ipc"):
        monkeypatch.setattr(remote_weights, name, lambda *of, name=name: seen.append(name) or nullcontext({}))
    launch, place = SimpleNamespace(name="vLLM"), SimpleNamespace(path="/")
    process = SimpleNamespace(launch=launch, shared=place, call=lambda *_, **__: {"checksums": {}})
    weights, sync = ServedWeights({EMBED: (5, 2)}, (), False), SyncSection(transport=transport)
    VllmBackend(process, weights, EngineOptions(RolloutSection(), MODEL, sync, device=device))._send("weights", [])
    assert seen == [used]
