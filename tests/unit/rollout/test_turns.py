"""Trajectories of several turns are a function of seed, policy and environment: nothing else shows in them."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.drafters.decoder import Pairs
from megatron_tlt.rollout import engine as engine_module
from megatron_tlt.rollout.hidden_states import HiddenStateCollector
from megatron_tlt.rollout.request import Request
from megatron_tlt.rollout.speculation.trained import TrainedDrafter
from megatron_tlt.rollout.turns import TurnExchange
from megatron_tlt.types import GenerateCall, HiddenStateSample, SamplingParams, Trajectory
from tests.helpers import engines
from tests.helpers.fake_decoder import (
    PROMPTS,
    CharTokenizer,
    FakeTurns,
    Trajectories,
    fake_backend,
    fake_engine,
    run_turns,
    turn_by_turn,
)
from tests.helpers.tiny_models import random_weights, read_hidden_states


@pytest.fixture(scope="module")
def jobs():
    return engines.random_jobs(50, 12, seed=3, longest=70, stops=[(7, 8, 9), (7,)], turns=[0, 1, 12])


@pytest.fixture(scope="module")
def reference(jobs) -> Trajectories:
    expected = turn_by_turn(fake_engine(), jobs, FakeTurns())
    assert {t[-1] for t in expected.values()} == {"env", "max_turns", "cut", "abort", "length"}
    assert max(len(t[3]) for t in expected.values()) == 4
    return expected


@pytest.mark.parametrize(
    ("sizes", "delay"),
    [
        ({}, None),
        ({}, 1),
        ({"max_running": 1}, 2),
        ({"max_running": 3, "budget": 4}, 1),
        ({"max_running": 64, "block_size": 1}, 2),
    ],
)
def test_no_batch_and_no_delay_shows(jobs, reference: Trajectories, sizes: dict, delay: int | None):
    source = FakeTurns(delay=None if delay is None else random.Random(delay))
    assert run_turns(fake_engine(**sizes), jobs, source) == reference
    assert all(text == CharTokenizer().decode(tokens) for tokens, text in source.seen)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_no_memory_pressure_shows(jobs, reference: Trajectories, block_size: int):
    longest = max(len(j[1]) + j[2].max_tokens for j in jobs)
    smallest = -(-longest // block_size) + 1
    preempted = 0
    for extra in (0, 1, 5, 12):
        sizes = {"num_blocks": smallest + extra, "block_size": block_size, "budget": 24}
        engine = fake_engine(**sizes)
        assert run_turns(engine, jobs, FakeTurns(delay=random.Random(extra))) == reference
        preempted += engine.take_stats().preemptions
    assert preempted > 10


def test_a_turn_that_goes_on_keeps_its_place_before_later_arrivals():
    """Its prefill ends beside that of a prompt which came while it waited; then memory runs out."""
    engine = fake_engine(budget=8)
    params = SamplingParams(max_tokens=20, max_turn_tokens=3, ignore_eos=True, seed=5)
    (first,) = engine.add([1, 2, 3], params, 0, indices=[0], takes_turns=True)
    while not engine.advance().turns:
        pass
    engine.add(list(range(1, 11)), params, 1, indices=[0])
    engine.step()  # most of the later prompt
    engine.extend(first, [4, 5])
    engine.step()  # the rest of both
    assert [prefill.order for prefill in engine.scheduler._ready] == [0, 1]
    engine.scheduler.preempt()
    engine.step()
    assert engine.scheduler.rows.requests == [first]


def test_most_steps_may_draft():
    """64 trajectories, short answers: a step with prefill drafts nothing, so answers gather for one of their own."""
    params = SamplingParams(max_tokens=120, max_turn_tokens=25, ignore_eos=True, seed=5)
    jobs = [(i, list(range(1, 9)), params, 4) for i in range(16)]
    engine = fake_engine(num_blocks=4000, max_running=64, budget=512, block_size=4)
    steps, schedule = [], engine.scheduler.schedule

    def counted():
        batch = schedule()
        steps.append((batch.num_decode, len(batch.chunks)))
        return batch

    engine.scheduler.schedule = counted  # type: ignore[method-assign]
    run_turns(engine, jobs, FakeTurns(delay=random.Random(0), longest=5))
    assert not [step for step in steps if all(step)], "prefill in a step that decodes"
    assert sum(decoding > 0 for decoding, _ in steps) > 0.8 * len(steps)
    assert engine.take_stats().prefill_steps == sum(not decoding for decoding, _ in steps)


def test_a_call_with_environments_counts_their_turns():
    backend, source, seen = fake_backend(), FakeTurns(delay=random.Random(1)), []
    params = SamplingParams(max_tokens=60, max_turn_tokens=12, seed=5)
    samples = backend.generate(GenerateCall(PROMPTS, params, 3, turns=source, on_response=seen.append))
    assert sorted(seen, key=lambda s: (s.prompt_id, s.sample_index)) == samples and len(samples) == 18
    for sample in samples:
        last = sample.token_ids[sample.given[-1][1] if sample.given else 0 :]
        assert sample.text == CharTokenizer().decode(last)
        assert (sample.failure is not None) == (sample.finish_reason == "abort")
        assert len(sample.turn_seconds) == len(sample.turn_rewards) + (sample.failure is not None)
        assert not np.array(sample.logprobs)[~Trajectory.of((1,), sample).drawn].any()
    stats = backend.take_stats()
    assert stats.turns == len(source.seen) == sum(len(s.turn_rewards) + (s.failure is not None) for s in samples)
    assert stats.generated_tokens == sum(s.num_drawn for s in samples)
    assert stats.given_tokens == sum(len(s.token_ids) - s.num_drawn for s in samples)
    assert stats.finished_requests == 18
    plain = backend.generate(GenerateCall(PROMPTS, replace(params, max_tokens=12, max_turn_tokens=0), 3))
    by_turn = {(s.prompt_id, s.sample_index): s for s in samples}
    assert all(by_turn[s.prompt_id, s.sample_index].token_ids[: len(s.token_ids)] == s.token_ids for s in plain)
    assert {s.finish_reason for s in plain} == {"stop", "length"}


def test_other_work_is_done_while_all_wait_and_only_then():
    backend, source = fake_backend(), FakeTurns(delay=random.Random(2))
    calls: list[float] = []
    progress: list[tuple[int, ...]] = []

    def work(seconds: float) -> bool:
        scheduler = backend.engine.scheduler
        assert len(scheduler.parked) and not scheduler.has_work
        calls.append(seconds)
        return len(calls) % 3 > 0

    call = GenerateCall(PROMPTS[:2], SamplingParams(max_tokens=60, max_turn_tokens=12, seed=5), 1, turns=source)
    expected = backend.generate(call)
    backend.take_stats()
    waits, source.waits = source.waits, 0
    assert backend.generate(replace(call, while_parked=work, on_progress=lambda *n: progress.append(n))) == expected
    assert 0 < source.waits < waits and calls[0] == 0.0 < max(calls)
    stats = backend.take_stats()
    assert stats.parked_seconds > 0 and stats.parked_spans[-1][1] - stats.parked_spans[0][0] >= max(calls)
    assert sum(end - begin for begin, end in stats.parked_spans) >= 0.999 * stats.parked_seconds


def test_a_wait_begins_when_nothing_is_left_to_compute():
    seconds: list[float] = []
    clock = iter(range(9))
    exchange = TurnExchange(
        FakeTurns(), TensorParallel(), lambda passed: bool(seconds.append(passed)), lambda: float(next(clock))
    )
    exchange.add(PROMPTS[0])
    request = Request(np.array([1], np.int32), SamplingParams(), 0, 0, 0, frozenset(), output=[3])
    for _ in range(2):
        exchange.submit(request, "a")
        for _ in range(2):
            exchange.poll(wait=True)
    assert seconds == [0.0, 1.0, 0.0, 1.0]


def test_a_rollout_that_is_cut_short_closes_all_environments(monkeypatch: pytest.MonkeyPatch):
    backend, source = fake_backend(), FakeTurns(delay=random.Random(3))
    params = SamplingParams(max_tokens=60, max_turn_tokens=12, seed=5)

    def stop(running: int, waiting: int, tokens: int) -> None:
        if len(source.live) > 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(engine_module, "_REPORT_EVERY_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        backend.generate(GenerateCall(PROMPTS, params, 3, turns=source, on_progress=stop))
    assert not source.live and backend.engine.is_idle
    assert backend.engine.blocks.num_free == backend.engine.blocks.num_blocks


CONFIG = engines.small_config("qwen2_moe")
WEIGHTS = random_weights(CONFIG, seed=5)
DRAFTERS = [
    {"drafter": "suffix", "selector": "fixed", "draft_len": 5},
    {"drafter": "eagle", "selector": "fixed", "draft_len": 4, "catch_up": 16},
]


@pytest.fixture(scope="module")
def real_jobs():
    rng = random.Random(8)
    return [
        (
            i,
            [rng.randrange(1, 131) for _ in range(rng.randint(1, 60))],
            SamplingParams(max_tokens=rng.randint(20, 90), max_turn_tokens=rng.choice([0, 14]), seed=17),
            rng.randint(1, 4),
        )
        for i in range(8)
    ]


@pytest.fixture(scope="module")
def plain(real_jobs) -> Trajectories:
    return turn_by_turn(engines.make_engine(CONFIG, WEIGHTS), real_jobs, FakeTurns(131))


@pytest.mark.parametrize("speculation", DRAFTERS, ids=lambda value: "-".join(map(str, value.values())))
def test_no_draft_shows_and_states_are_whole(real_jobs, plain: Trajectories, speculation: dict):
    """Ample memory, then so little that parked requests lose their blocks, also those that are ended then."""
    for blocks in (200, 11):
        engine = engines.speculating_engine(CONFIG, WEIGHTS, speculation=speculation, num_blocks=blocks)
        samples: list[HiddenStateSample] = []
        engine.collect_hidden_states(HiddenStateCollector(samples.append))
        engine.record_routed_experts()
        assert engine.speculator is not None
        if engine.speculator.trained is not None:
            check_pairs(engine.speculator.trained)
        for again in range(2):
            samples.clear()
            source = FakeTurns(131, delay=random.Random(again))
            assert run_turns(engine, real_jobs, source) == plain
            assert len(samples) == sum(len(output) > 1 for output, *_ in plain.values())
        stats = engine.take_stats()
        assert stats.speculation.row_steps > 0
        assert (stats.preemptions > 0) == (blocks == 11)
        texts = [sample.trajectory.token_ids.tolist() for sample in samples]
        passed = read_hidden_states(engine.runner.decoder, texts, 16, 512)
        for sample, want in zip(samples, passed, strict=True):
            assert torch.equal(sample.hidden, want[:-1])
            at = sample.trajectory.prompt_id, sample.trajectory.sample_index
            assert sample.trajectory.given == plain[at][2]


def check_pairs(drafter: TrainedDrafter) -> None:
    """At the start of a further turn all pairs are in the cache: computing them again changes no bit of it."""
    start, rows = drafter.start, drafter._rows

    def checked(request: Request) -> None:
        size, count = drafter.kv.block_size, int(rows.positions[request.row])
        positions = np.arange(count, dtype=np.int32)
        slots = rows.block_tables[request.row][positions // size] * size + positions % size
        tokens = np.concatenate((request.prompt, request.output)).astype(np.int32)[1:count]
        before = drafter.kv.data.clone()
        if request.given:  # else its first block may still be to be copied
            pairs = Pairs(tokens, positions[1:], slots[1:], slots[:-1])
            drafter.decoder.feed(pairs, drafter._pages.data, drafter.kv)
        assert torch.equal(drafter.kv.data, before)
        start(request)

    drafter.start = checked  # type: ignore[method-assign]
