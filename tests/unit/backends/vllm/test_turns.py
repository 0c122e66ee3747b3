"""Trajectories of an engine that draws a turn a request are those of the embedded engine, which parks them."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megatron_tlt.backends.options import EngineOptions
from megatron_tlt.backends.vllm.backend import VllmBackend
from megatron_tlt.config.model import ModelSection
from megatron_tlt.config.rollout import RolloutSection
from megatron_tlt.models.decoders.keys import request_key
from megatron_tlt.rollout.request import Prefill, Request
from megatron_tlt.sync.served_weights import ServedWeights
from megatron_tlt.types import GenerateCall, HiddenStateSample, Sample, SamplingParams
from tests.helpers.fake_decoder import PROMPTS, CharTokenizer, FakeTurns, fake_backend, fake_engine
from tests.helpers.stepping import run_out

SEED, SAMPLES, RUNNING = 5, 3, 7
PARAMS = [
    SamplingParams(max_tokens=60, max_turn_tokens=12, seed=SEED),
    SamplingParams(max_tokens=25, stop_token_ids=(7, 8, 9), seed=SEED),
    SamplingParams(max_tokens=60, stop=("a", "xy"), temperature=0.7, top_k=5, seed=SEED),
    SamplingParams(max_tokens=90, stop=("<end>", "xyz"), ignore_eos=True, seed=SEED),
]


class EngineProcess:
    """An engine that draws one request at a time, in any order, with heartbeats and waits between responses."""

    launch = SimpleNamespace(name="vLLM")
    is_alive = True

    def __init__(self, folder: Path, own_beats: int = 0) -> None:
        """`own_beats` seeds when a heartbeat of this process alone comes, or nothing in time."""
        self.folder, self.engine = folder, fake_engine()
        self.random, self.beats = random.Random(1), random.Random(own_beats)
        self.requests: list[dict[str, Any]] = []
        self.responses: list[dict[str, Any]] = []
        self.submitted: list[tuple[Any, ...]] = []
        self.pre_rolled: dict[tuple[int, int], list[int]] = {}  # that requests have brought
        self.most = 0

    def send(self, message: dict[str, Any]) -> None:
        self.requests.append(message)
        self.submitted.append((message["key"], message["start"], message["token_ids"]))
        if "pre_rolled" in message:
            self.pre_rolled[message["prompt_id"], index_of(message)] = message["pre_rolled"]
        self.most = max(self.most, len(self.requests))

    def call(self, kind: str, patience: float | None = None) -> None:
        assert kind == "abort"
        while self.requests:
            drawn = self.drawn()
            size = self.random.randrange(len(drawn["token_ids"]) + 1)
            self.responses.append({**drawn, "token_ids": drawn["token_ids"][:size], "finish_reason": "cancelled"})

    def next_response(self, wait_s: float | None = None) -> dict[str, Any] | None:
        assert self.requests, "waits for an engine that has nothing to do"
        if self.beats.random() < 0.4:
            if wait_s is not None and self.beats.random() < 0.5:
                return None
            return {"type": "beat", "in_flight": len(self.requests), "last_request": -1, "lengths": [2]}
        if self.random.random() < 0.3:
            return {"type": "beat", "in_step": True}
        return self.drawn()

    def drawn(self) -> dict[str, Any]:
        message = self.requests.pop(self.random.randrange(len(self.requests)))
        of, start, tokens = message["params"], message["start"], message["token_ids"]
        index = index_of(message)
        temperature, top_k, top_p, min_p = of["sampling"]
        params = SamplingParams(temperature, top_k, top_p, min_p, start + of["max_tokens"], 0, tuple(of["stop"]))
        params = replace(params, stop_token_ids=tuple(of["stop_token_ids"]), seed=SEED)
        stops, finder = frozenset(params.stop_token_ids), self.engine._stop_finder(params)
        stream, end = np.array(tokens, np.int32), len(tokens) - start
        request = Request(stream[:end], params, message["prompt_id"], index, 0, stops, finder)
        request.output, request.logprobs = tokens[end:], [0.0] * start
        self.engine.scheduler.add(Prefill(stream, [request]))
        (request,) = run_out(self.engine)
        path = self.folder / str(message["id"])
        save_file({"hidden": torch.arange(end + len(request.output) - 1)[:, None]}, path)
        text = {} if finder is None or finder.cut_text is None else {"text": finder.cut_text}
        drawn = {"token_ids": request.output[start:], "finish_reason": request.finish_reason}
        return {"type": "response", "id": message["id"], **drawn, **text, "kept": str(path)}


def index_of(message: dict[str, Any]) -> int:
    """Sample index of a request."""
    return [request_key(SEED, message["prompt_id"], i) for i in range(SAMPLES)].index(message["key"])


def make_backend(process: EngineProcess, tp: Any = None) -> VllmBackend:
    rollout = RolloutSection(backend="vllm", max_running_requests=RUNNING)
    model = ModelSection(path="/model", max_context=128)
    options = EngineOptions(rollout, model, tokenizer=CharTokenizer(), tp=tp)  # type: ignore[arg-type]
    return VllmBackend(process, ServedWeights({}, version=0), options, (0,))  # type: ignore[arg-type]


@pytest.mark.parametrize("params", PARAMS)
def test_trajectories_and_their_states_are_the_embedded_engines(tmp_path: Path, params: SamplingParams) -> None:
    embedded = fake_backend()
    expected = embedded.generate(GenerateCall(PROMPTS, params, SAMPLES, turns=FakeTurns()))
    process, source = EngineProcess(tmp_path), FakeTurns(delay=random.Random(2))
    backend, seen, states = make_backend(process), [], []  # type: ignore[var-annotated]
    backend.collect_hidden_states(states.append)
    call = GenerateCall(PROMPTS, params, SAMPLES, turns=source, on_response=seen.append)
    samples = backend.generate(call)
    assert samples == [replace(sample, logprobs=[]) for sample in expected]
    assert sorted(seen, key=lambda s: (s.prompt_id, s.sample_index)) == samples
    assert all(text == CharTokenizer().decode(tokens) for tokens, text in source.seen) or params.stop
    assert source.discarded == {name(s) for s in samples if s.finish_reason == "length"} and not source.live
    assert process.most == RUNNING
    mine, theirs = backend._stats, embedded.take_stats()
    for counter in ("turns", "given_tokens", "generated_tokens", "finished_requests"):
        assert getattr(mine, counter) == getattr(theirs, counter) > 0
    check_states(states, samples)
    assert list(tmp_path.iterdir()) == []


def name(sample: Sample) -> tuple[int, int]:
    return sample.prompt_id, sample.sample_index


def check_states(states: list[HiddenStateSample], samples: list[Sample]) -> None:
    by_name = {name(sample): sample for sample in samples if len(sample.token_ids) > 1}
    assert len(states) == len(by_name) and any(sample.given for sample in samples)
    for found in states:
        trajectory = found.trajectory
        sample = by_name[trajectory.prompt_id, trajectory.sample_index]
        assert trajectory.given == sample.given
        assert trajectory.token_ids.tolist() == [*PROMPTS[sample.prompt_id].token_ids, *sample.token_ids]
        assert found.hidden[:, 0].tolist() == list(range(trajectory.length - 1)), "of all turns"
        assert found.key == request_key(SEED, *name(sample))


def test_other_work_is_done_only_while_all_wait(tmp_path: Path) -> None:
    process, source = EngineProcess(tmp_path), FakeTurns(delay=random.Random(3))
    backend, waits, seen = make_backend(process), [], []  # type: ignore[var-annotated]

    def work(seconds: float) -> bool:
        assert not process.requests and source.held
        waits.append(seconds)
        time.sleep(0.001)
        return len(waits) % 3 > 0

    call = GenerateCall(PROMPTS[:2], PARAMS[0], 1, turns=source)
    expected = backend.generate(call)
    before, source.waits, stats = source.waits, 0, backend._stats
    stats.parked_seconds = stats.seconds = 0.0
    progress = {"while_parked": work, "on_progress": lambda *of: seen.append(of)}
    assert backend.generate(replace(call, **progress)) == expected
    assert 0 < source.waits < before and waits[0] == 0.0 < max(waits)
    assert stats.parked_seconds >= 0.001 * len(waits) and stats.seconds > 0
    assert any(running == 0 < waiting for running, waiting, _ in seen), "parked requests are reported as waiting"


def test_a_rollout_that_is_cut_short_closes_environments_and_leaves_no_file(tmp_path: Path) -> None:
    process, source = EngineProcess(tmp_path), FakeTurns(delay=random.Random(4))

    drawing: set[tuple[int, int]] = set()

    def stop(running: int, waiting: int, tokens: int) -> None:
        drawing.update((m["prompt_id"], index_of(m)) for m in process.requests if m["start"])
        if len(source.live) > 2 and drawing:
            raise KeyboardInterrupt
        drawing.clear()

    with pytest.raises(KeyboardInterrupt):
        make_backend(process).generate(GenerateCall(PROMPTS, PARAMS[0], SAMPLES, stop, turns=source))
    assert not source.live and drawing <= source.discarded and not process.responses
    assert list(tmp_path.iterdir()) == []


def test_ranks_of_an_engine_submit_alike(tmp_path: Path) -> None:
    """Each with heartbeats of its own process; the first one's environments are used."""
    results: list[Any] = []
    first, second = (EngineProcess(tmp_path, own_beats) for own_beats in (1, 2))
    tp = SimpleNamespace(size=2, rank=0, broadcast_object=lambda found: results.append(found) or found)
    source = FakeTurns(delay=random.Random(5))
    call = GenerateCall(PROMPTS, PARAMS[0], SAMPLES, turns=source)
    samples = make_backend(first, tp).generate(call)
    sent = iter(results)
    tp = SimpleNamespace(size=2, rank=1, broadcast_object=lambda _: next(sent))
    other = FakeTurns()
    assert make_backend(second, tp).generate(replace(call, turns=other)) == samples
    assert first.submitted == second.submitted and next(sent, None) is None
    assert not other.seen and not other.discarded
