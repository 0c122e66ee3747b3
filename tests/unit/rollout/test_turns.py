"""Trajectories of several turns are a function of seed, policy and environment: nothing else shows in them."""

from __future__ import annotations

import random

import pytest

from megatron_tlt.rollout.engine import Engine
from megatron_tlt.rollout.scheduler import SchedulerLimits
from megatron_tlt.types import SamplingParams
from tests.helpers.fake_decoder import CharTokenizer, FakeDecoder
from tests.helpers.fake_turns import FakeTurns, Trajectories, run_turns, turn_by_turn

V = 50
SIZES = {"num_blocks": 400, "max_running": 8, "budget": 64, "block_size": 4}


def make_engine(num_blocks: int, max_running: int, budget: int, block_size: int) -> Engine:
    limits = SchedulerLimits(max_running, budget, 128, V)
    return Engine(
        FakeDecoder(V), limits, num_blocks, block_size, tokenizer=CharTokenizer(), eos_token_ids=(0,)
    )


@pytest.fixture(scope="module")
def jobs():
    rng = random.Random(3)
    found = []
    for i in range(12):
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.0]),
            top_k=rng.choice([0, 0, 5]),
            max_tokens=rng.randint(1, 70),
            max_turn_tokens=rng.choice([0, 1, 12]),
            stop=rng.choice([(), (), ("a", "xy")]),
            stop_token_ids=rng.choice([(7, 8, 9), (7,)]),
            seed=5,
        )
        found.append((i, [rng.randrange(1, V) for _ in range(rng.randint(1, 40))], params, rng.randint(1, 5)))
    return found


@pytest.fixture(scope="module")
def reference(jobs) -> Trajectories:
    expected = turn_by_turn(make_engine(**SIZES), jobs, FakeTurns())
    assert {t[-1] for t in expected.values()} == {"env", "abort", "length"}
    assert max(len(t[3]) for t in expected.values()) == 4
    return expected


@pytest.mark.parametrize("delay", [None, 1, 2])
@pytest.mark.parametrize(
    "sizes", [{}, {"max_running": 1}, {"max_running": 3, "budget": 4}, {"max_running": 64, "block_size": 1}]
)
def test_no_batch_and_no_delay_shows(jobs, reference: Trajectories, sizes: dict, delay: int | None):
    source = FakeTurns(delay=None if delay is None else random.Random(delay))
    assert run_turns(make_engine(**SIZES | sizes), jobs, source) == reference
    assert all(text == CharTokenizer().decode(tokens) for tokens, text in source.seen)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_no_memory_pressure_shows(jobs, reference: Trajectories, block_size: int):
    longest = max(len(j[1]) + j[2].max_tokens for j in jobs)
    smallest = -(-longest // block_size) + 1
    preempted = 0
    for extra in (0, 1, 5, 12):
        sizes = {"num_blocks": smallest + extra, "block_size": block_size, "budget": 24}
        engine = make_engine(**SIZES | sizes)
        assert run_turns(engine, jobs, FakeTurns(delay=random.Random(extra))) == reference
        preempted += engine.take_stats().preemptions
    assert preempted > 10
