"""Trajectories of several turns are a function of seed, policy and environment: nothing else shows in them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from megatron_tlt.models.drafter_decoder import Pairs
from megatron_tlt.rollout.engine import Engine
from megatron_tlt.rollout.hidden_states import HiddenStateCollector
from megatron_tlt.rollout.request import Request
from megatron_tlt.rollout.scheduler import SchedulerLimits
from megatron_tlt.rollout.spec.trained import TrainedDrafter
from megatron_tlt.types import HiddenStateSample, SamplingParams
from tests.helpers import engines
from tests.helpers.fake_decoder import CharTokenizer, FakeDecoder
from tests.helpers.fake_turns import FakeTurns, Trajectories, run_turns, turn_by_turn
from tests.helpers.tiny_models import random_weights
from tests.helpers.whole_texts import read_hidden_states

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


CONFIG = engines.small_config("qwen2_moe")
WEIGHTS = random_weights(CONFIG, seed=5)
DRAFTERS = [
    {"drafter": "suffix", "selector": "fixed", "draft_len": 5},
    {"drafter": "eagle", "selector": "fixed", "draft_len": 4, "catch_up_tokens": 16},
    {"drafter": "eagle", "with_suffix": True, "selector": "beg_mab"},
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
    """At each start of a request's further turn its pairs are all in the cache: computing them again changes no bit of it."""
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
