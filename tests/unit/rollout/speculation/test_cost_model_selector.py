"""The cost-model selector in a simulated engine: near the best fixed draft length, never much below plain decoding."""

from functools import cache

import numpy as np
import pytest

from megatron_tlt.rollout.speculation.cost_model_selector import CostModelSelector
from megatron_tlt.rollout.speculation.step_costs import Expected
from megatron_tlt.types import NO_DRAFT
from tests.helpers.spec_world import (
    SpecWorld,
    bf16_seconds,
    expert_seconds,
    fixed_speeds,
    gpu_seconds,
    linear_seconds,
    measured,
)

LENGTHS = (1, 2, 4, 8)
GPU = {"step_seconds": gpu_seconds, "draft_call": 4e-4, "draft_node": 2e-6}
COLD = (2.0, 1.9, 1.75, 1.55, 1.4, 1.3, 1.25, 1.2, 1.1, 1.03)  # as measured on a core with a small cache
WORLDS = {
    "cpu": {},
    "gpu": GPU,
    "cheap drafts": {"draft_call": 5e-6, "draft_node": 1e-6, "quality": 0.5},  # as of a suffix drafter
    "noisy": {"noise": 0.15, "outliers": 0.05},
    "experts": {**GPU, "step_seconds": expert_seconds},  # rows cost less and less: no term of the fit says so
}
BF16 = {"step_seconds": bf16_seconds, "draft_call": 2e-3, "draft_node": 3e-4, "quality": 0.85}
LOSING = {
    "linear": {"step_seconds": linear_seconds},  # every row costs as much
    "useless": {"quality": 0.02},
    "useless gpu": {**GPU, "quality": 0.02},
    "noisy": {"step_seconds": linear_seconds, "noise": 0.15, "outliers": 0.05},
    "cold": {"step_seconds": linear_seconds, "cold": COLD},
}


@cache
def best_fixed(name, running):
    return max(fixed_speeds(running, LENGTHS, **WORLDS[name]).values())


@pytest.mark.parametrize(("name", "running"), [*((name, 16) for name in WORLDS), ("cpu", 1), ("gpu", 64)])
def test_within_five_percent_of_the_best_fixed_draft_length(name, running):
    selector, world = CostModelSelector("trained", 8), SpecWorld(seed=3, **WORLDS[name])
    world.run(selector, 1000, running)
    assert world.run(selector, 1200) >= 0.95 * best_fixed(name, running)


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_what_a_usual_step_brings_is_what_it_has_brought(name):
    """Tokens a second of the expectation, beside the engine's own."""
    selector, world = CostModelSelector("trained", 8), SpecWorld(seed=3, **WORLDS[name])
    assert selector.expected(4) == Expected()
    world.run(selector, 1000, 4)
    speed, usual = world.run(selector, 400), selector.expected(4)
    seconds = float(world.step_seconds(4, 4 * usual.rows)) + usual.draft_seconds
    assert 4 * usual.tokens / seconds == pytest.approx(speed, rel=0.05)


@pytest.mark.parametrize("name", LOSING)
@pytest.mark.parametrize("running", [1, 32])
def test_where_drafting_loses_plain_decoding_keeps_its_speed(name, running):
    selector, world = CostModelSelector("trained", 8), SpecWorld(seed=1, **LOSING[name])
    first, later = world.run(selector, 1500, running), world.run(selector, 1000)
    assert first >= 0.95 * world.plain_speed()  # with the price of finding out
    assert later >= 0.95 * world.plain_speed()


def test_trials_of_losing_drafts_become_rare_with_their_budget(monkeypatch):
    shares = {}
    for exploration in (0.02, 0.002):
        monkeypatch.setattr("megatron_tlt.rollout.speculation.cost_model_selector.EXPLORATION", exploration)
        selector, world = CostModelSelector("trained", 8), SpecWorld(quality=0.02)
        world.run(selector, 5000, 4)
        shares[exploration] = 1 - world.tokens / world.clock / world.plain_speed()
    assert 0 < shares[0.002] < 0.5 * shares[0.02] < 0.5 * 0.035


@pytest.mark.parametrize(
    ("world", "running", "least"), [(BF16, 2, 1.3), ({**WORLDS["experts"], "quality": 0.7}, 1, 0.97)]
)
def test_what_64_requests_taught_is_soon_corrected_in_a_small_batch(world, running, least):
    """Drafts lose with 64 requests and gain with 2; of experts, which 64 read together, the other way round."""
    found = []
    for seed in range(5):
        selector, small = CostModelSelector("trained", 8), SpecWorld(seed=seed, **world)
        small.run(selector, 80, 64)
        small.run(selector, 200, running)
        found.append(small.run(selector, 300) / small.plain_speed())
    assert np.mean(found) >= least


def rollouts(qualities, world, changes=True, longest=8):
    """Speed over that of plain decoding, by rollout; a new drafter of each quality comes before each rollout."""
    selector, world, shares = CostModelSelector("trained", longest), SpecWorld(**world), []
    rng = np.random.default_rng(0)
    for quality in qualities:
        world.quality, world.clock = quality, 0.0
        if changes:
            selector.drafter_changed()
        lengths = np.clip(rng.lognormal(4.2, 0.7, 64), 10, 400).astype(int)
        world.start(lengths)
        while len(world.lengths):
            world.step(selector)
        running = (lengths[:, None] > np.arange(lengths.max())).sum(0)
        shares.append(sum(float(world.step_seconds(B, B)) for B in running) / world.clock)
    return shares


def test_whole_rollouts_with_a_long_tail():
    """About 40 steps in each bucket of each rollout. The first trial of drafts that lose is in the largest batch."""
    assert np.mean(rollouts([0.8] * 8, GPU, changes=False)[4:]) > 2.5
    assert np.mean(rollouts([0.02] * 8, {}, changes=False)[4:]) > 0.96
    assert np.mean([rollouts([0.02], {"seed": seed}, longest=11) for seed in range(4)]) > 0.88


def test_a_drafter_that_has_improved_is_used_in_the_next_rollout():
    """Without a word of it, it waits for the next trial of the drafter before it."""
    told, untold = (
        np.mean([rollouts([0.02] * 4 + [0.7], {**GPU, "seed": s}, changes)[-1] for s in range(3)])
        for changes in (True, False)
    )
    assert told > 1.7 and told > 1.5 * untold


@pytest.mark.parametrize("name", ["useless", "useless gpu"])
def test_new_drafters_that_stay_bad_cost_less_than_two_percent(name):
    found = [rollouts([0.02] * 8, {**LOSING[name], "seed": seed}) for seed in range(3)]
    assert np.mean(found, axis=0)[2:].mean() > 0.98


def test_a_long_run_has_ended_many_intervals():
    """More than an integer has bits."""
    selector, world = CostModelSelector("trained", 8), SpecWorld(seed=3)
    world.run(selector, 100, 4)
    for bucket in selector._buckets.values():
        bucket.intervals = 1 << 62
    world.run(selector, 200, 4)
    assert all(bucket.intervals > 1 << 62 for bucket in selector._buckets.values())


def test_adapts_to_a_change_of_acceptance_and_of_speeds():
    selector, world = CostModelSelector("trained", 8), SpecWorld(seed=3, **GPU)
    assert world.run(selector, 1000, 4) > 2 * world.plain_speed()
    world.quality = 0.02  # a drafter that turned bad ...
    world.run(selector, 1500)
    assert world.run(selector, 2000) > 0.96 * world.plain_speed()
    world.quality = 0.8  # ... and good again
    world.run(selector, 8000)
    assert world.run(selector, 500) > 2 * world.plain_speed()
    world.draft_call = 0.02  # a drafter that became slow: found out at the next trial of plain decoding
    world.run(selector, 3000)
    assert world.run(selector, 2000) > 0.94 * world.plain_speed()


def test_drafts_without_a_token_count_as_not_accepted():
    selector = CostModelSelector("suffix", 4)
    empty = np.zeros(0, np.int64)
    drafted = 0
    for _ in range(1000):
        strategy = selector.select(2)
        drafted += strategy != NO_DRAFT
        seconds = 1e-3 if strategy.kind == "none" else 1.2e-3
        m = measured(strategy, 2, 2, np.ones(2, np.int64), 0.0, seconds)
        selector.record(type(m)(strategy, 2, 2, 0.0, seconds, 2, strategy.draft_len, empty))
    assert drafted < 150


def test_equal_inputs_give_equal_decisions():
    selectors = [CostModelSelector("trained", 8) for _ in range(2)]
    for selector in selectors:
        world = SpecWorld(seed=9, **GPU)
        for running in (40, 5, 1):
            world.run(selector, 300, running)
    assert selectors[0]._fit() == selectors[1]._fit() and selectors[0]._acceptance == selectors[1]._acceptance
    speeds = [SpecWorld(seed=2, **GPU).run(s, 50, 1) for s in (selectors[0], CostModelSelector("trained", 8))]
    assert speeds[0] > 1.2 * speeds[1]  # it knows what the other must find out


def test_a_drafter_of_one_pass_is_used_at_its_full_length():
    """A pass takes a third of the policy's step: position by position long drafts do not pay, as a block they do."""
    chosen = {}
    for passes in (int, lambda length: 1):

        class World(SpecWorld):
            def draft(self, strategy, passes=passes):
                emitted, rows, _ = super().draft(strategy)
                return emitted, rows, 1e-3 * passes(strategy.draft_len)

        selector, world = CostModelSelector("trained", 8, passes=passes), World(seed=1, **GPU)
        world.run(selector, 3000, 4)
        bucket = selector._buckets[3]
        chosen[passes(8)] = bucket.candidates[bucket.best].length
        predicted = bucket.costs.draft_seconds(4, passes(8))
        assert predicted == pytest.approx(1e-3 * passes(8), rel=0.2)
    assert chosen[8] < chosen[1] == 8


def test_a_first_trial_that_the_batch_size_leaves_is_made_anew():
    selector, world = CostModelSelector("trained", 8), SpecWorld(seed=3, **GPU)
    world.start(np.full(8, 10**9))
    while not selector.select(8).draft_len:
        world.step(selector)
    world.step(selector)
    world.start(np.full(7, 10**9))
    drafted = 0
    for _ in range(200):
        drafted += selector.select(7).draft_len > 0
        world.step(selector)
    assert drafted > 100
