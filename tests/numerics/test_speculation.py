"""Speculative and plain decoding give the same tokens and log-probabilities, bit for bit, whatever is drafted."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron_tlt.models.factory import build_decoder
from megatron_tlt.models.native import keyed_sample
from megatron_tlt.rollout.engine import Engine
from megatron_tlt.rollout.scheduler import SchedulerLimits
from megatron_tlt.types import SamplingParams
from tests.helpers.drafters import OracleDrafter, RandomSelector, attach
from tests.helpers.engines import Answers, answer_all, make_engine, random_jobs, small_config
from tests.helpers.tiny_models import random_weights


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def plain(family: str, jobs, **options) -> tuple[Answers, list]:
    config = small_config(family)
    weights = random_weights(config, seed=5)
    return answer_all(make_engine(config, weights, **options), jobs), weights


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("spoil", [0.0, 0.3, 1.0], ids=["right", "mixed", "wrong"])
def test_equal_whatever_is_drafted(family, tree, spoil):
    jobs = random_jobs(131, 8, seed=3)
    expected, weights = plain(family, jobs)
    engine = make_engine(small_config(family), weights)
    selector = RandomSelector("oracle", 6, 3)
    attach(engine, OracleDrafter(expected, 131, spoil, tree), selector)
    assert answer_all(engine, jobs) == expected
    assert engine.blocks.num_used == 0
    if spoil < 1 or tree:  # a spoiled trunk still has right siblings
        assert selector.emitted > 1.1 * selector.rows
    else:
        assert selector.emitted < 1.1 * selector.rows


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_equal_under_memory_pressure(tree):
    jobs = random_jobs(131, 14, seed=4)
    expected, weights = plain("qwen3", jobs)
    engine = make_engine(small_config("qwen3"), weights, num_blocks=14, max_running=8)
    attach(engine, OracleDrafter(expected, 131, 0.2, tree), RandomSelector("oracle", 8, 2))
    assert answer_all(engine, jobs) == expected
    assert engine.scheduler.num_preemptions > 0
    assert engine.blocks.num_free == engine.blocks.num_blocks


def test_equal_in_small_batches_and_budgets():
    jobs = random_jobs(131, 10, seed=6)
    expected, weights = plain("qwen2", jobs)
    for max_running, budget in ((1, 16), (3, 7), (16, 40)):
        engine = make_engine(small_config("qwen2"), weights, max_running=max_running, budget=budget)
        attach(engine, OracleDrafter(expected, 131, 0.2, True), RandomSelector("oracle", 8, 3))
        assert answer_all(engine, jobs) == expected


def test_equal_across_chunk_borders():
    """Contexts beyond 512 positions, where attention changes its chunk."""
    config = small_config("qwen2")
    weights = random_weights(config, seed=5)
    params = SamplingParams(max_tokens=60, ignore_eos=True, seed=3)
    jobs = [(i, list(range(1, 100)) * 5, params, 1) for i in range(2)]

    def long_engine() -> Engine:
        decoder = build_decoder(config, "cpu", torch.float32, "native", 1, None)
        decoder.load_weights(weights)
        limits = SchedulerLimits(4, 600, 1024, config.vocab_size)
        return Engine(decoder, limits, 100, 16, native_sample=partial(keyed_sample, threads=1))

    expected = answer_all(long_engine(), jobs)
    other = long_engine()
    attach(other, OracleDrafter(expected, 131, 0.2, True), RandomSelector("oracle", 12, 3))
    assert answer_all(other, jobs) == expected
