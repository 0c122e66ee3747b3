"""Stolen requests: which leave the queue, how they are served, where the responses go."""

from __future__ import annotations

import random

import pytest

from megatron_tlt.backends.embedded import EmbeddedBackend
from megatron_tlt.rollout.engine import Engine
from megatron_tlt.rollout.scheduler import SchedulerLimits
from megatron_tlt.sync.served_weights import ServedWeights
from megatron_tlt.trainer.stolen_requests import StolenRequests
from megatron_tlt.types import Prompt, Sample, SamplingParams
from tests.helpers.fake_decoder import CharTokenizer, FakeDecoder

V, SAMPLES = 50, 5
PARAMS = SamplingParams(temperature=1.0, max_tokens=24, seed=3, stop=("ab",))
PROMPTS = [Prompt(10 + i, f"q{i}", tuple(range(1, 3 + 2 * i)), "?") for i in range(6)]


class OneRank:
    rank, size = 0, 1


def make(max_running: int = 4, num_blocks: int = 400) -> tuple[EmbeddedBackend, StolenRequests]:
    limits = SchedulerLimits(max_running, 64, 128, V)
    engine = Engine(FakeDecoder(V), limits, num_blocks, 4, tokenizer=CharTokenizer(), eos_token_ids=(0,))
    backend = EmbeddedBackend(engine, ServedWeights({}, version=0))
    return backend, StolenRequests(backend, PARAMS, SAMPLES, OneRank())  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def alone() -> dict[tuple[int, int], Sample]:
    backend, _ = make(max_running=64)
    return {(s.prompt_id, s.sample_index): s for s in backend.generate(PROMPTS, PARAMS, SAMPLES)}


@pytest.mark.parametrize("seed", range(6))
def test_two_engines_give_the_responses_of_one(alone: dict, monkeypatch: pytest.MonkeyPatch, seed: int):
    """At random moments the other engine steals a share, from a pool so small that requests are preempted, too."""
    monkeypatch.setattr("megatron_tlt.rollout.engine._PROGRESS_EVERY_S", 0.0)
    rng = random.Random(seed)
    backend, victim = make(num_blocks=rng.choice((18, 30, 400)))
    other, thief = make(max_running=3)
    requests, kept = [], []

    def steal(running: int, waiting: int, generated: int) -> None:
        if rng.random() < 0.1:
            some = victim.withdraw_share()
            assert victim.num_queued() <= max(0, waiting - len(some))
            requests.extend(some)

    mine = backend.generate(PROMPTS, PARAMS, SAMPLES, steal)
    assert backend.engine.blocks.num_free == backend.engine.blocks.num_blocks
    assert requests
    by_id = {prompt.prompt_id: prompt for prompt in PROMPTS}
    theirs = thief.generate(by_id, requests, kept.append, lambda *_: None)
    assert sorted((s.prompt_id, s.sample_index) for s in kept) == [
        (s.prompt_id, s.sample_index) for s in theirs
    ]
    whole = {(s.prompt_id, s.sample_index): s for s in [*mine, *theirs]}
    assert len(whole) == len(mine) + len(theirs) == len(PROMPTS) * SAMPLES
    assert whole == alone
    assert other.engine.is_idle


def test_a_queue_that_the_next_step_may_change_is_not_known_yet(monkeypatch: pytest.MonkeyPatch):
    """Nothing runs before the first prompt is in; a prompt that takes several steps hides its samples for a while."""
    monkeypatch.setattr("megatron_tlt.rollout.engine._PROGRESS_EVERY_S", 0.0)
    limits = SchedulerLimits(8, 16, 128, V)
    engine = Engine(FakeDecoder(V), limits, 400, 4, tokenizer=CharTokenizer(), eos_token_ids=(0,))
    backend = EmbeddedBackend(engine, ServedWeights({}, version=0))
    stolen = StolenRequests(backend, PARAMS, 12, OneRank())  # type: ignore[arg-type]
    seen: list[tuple[int, int, int]] = []

    def look(running: int, waiting: int, generated: int) -> None:
        seen.append((running, waiting, stolen.num_queued()))
        if running == 0 and waiting:
            assert (stolen.withdraw_share(), stolen.num_queued()) == ([], -1)

    long = [Prompt(i, "q", tuple(range(1, 41)), "?") for i in range(2)]
    backend.generate(long, PARAMS, 12, look)
    assert seen[0][2] == -1
    assert all(queued != 0 for _, waiting, queued in seen if waiting)
    assert any(queued == waiting for running, waiting, queued in seen if running and waiting)
    assert seen[-1] == (0, 0, 0)


def test_a_cache_that_is_released_between_rollouts_stays_for_a_whole_step(monkeypatch: pytest.MonkeyPatch):
    limits = SchedulerLimits(4, 64, 128, V)
    engine = Engine(FakeDecoder(V), limits, 400, 4, tokenizer=CharTokenizer(), eos_token_ids=(0,))
    monkeypatch.setattr(engine.runner, "release", lambda: None)  # the fake decoder's cache is an array
    monkeypatch.setattr(engine.runner, "resume", lambda: None)
    backend = EmbeddedBackend(engine, ServedWeights({}, version=0), release_cache=True)
    stolen = StolenRequests(backend, PARAMS, SAMPLES, OneRank())  # type: ignore[arg-type]
    with stolen.holding():
        for _ in range(2):
            backend.generate(PROMPTS[:1], PARAMS, 1)
            assert not engine.is_released
    assert engine.is_released
    backend.generate(PROMPTS[:1], PARAMS, 1)
    assert engine.is_released


def test_samples_return_in_order():
    _, stolen = make()
    samples = [Sample(10, i, [1], [0.0], "", "stop", 0) for i in (3, 0, 2)]
    home = stolen.return_home(samples, {10: 0})
    assert [s.sample_index for s in home] == [0, 2, 3]
    assert stolen.take_count() == 0
