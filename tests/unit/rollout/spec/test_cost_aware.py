"""The cost-aware selector in a simulated engine: near the best fixed strategy everywhere, never much below plain."""

import json
from functools import cache

import numpy as np
import pytest

from megatron_tlt.rollout.spec.cost_aware import CostAware
from megatron_tlt.rollout.spec.strategy import FixedSelector
from megatron_tlt.types import NO_DRAFT, DraftStrategy
from tests.helpers.spec_world import SpecWorld, cpu_seconds, gpu_seconds

GPU = {"step_seconds": gpu_seconds, "draft_call": 4e-4, "draft_row": 2e-6, "catch_up_row": 2e-6}
CHEAP = {"draft_call": 5e-6, "draft_row": 1e-6, "catch_up_row": 0.0, "quality": 0.6}  # as a suffix drafter
WORLDS = {"cpu": {}, "gpu": GPU, "cheap": CHEAP, "useless": {"quality": 0.02}}


def speed(selector, running, world, warm, steps, seed=0):
    """Throughput over plain decoding's, after `warm` steps."""
    world = SpecWorld(seed=seed, **WORLDS[world])
    world.run(selector, warm, running)
    tokens, seconds = world.run(selector, steps)
    return tokens / seconds * float(world.step_seconds(running, running)) / running


def steps_at(running):
    return max(120, 1200 // running)


@cache
def best_fixed(running, world):
    fixed = [FixedSelector(DraftStrategy("eagle", length)) for length in (1, 2, 3, 5, 8)]
    return max(speed(s, running, world, 100, steps_at(running)) for s in fixed)


def lengths(seed, count=64):
    """A long tail of answers."""
    drawn = np.random.default_rng(seed).lognormal(4.2, 0.7, count)
    return np.clip(drawn, 10, 256).astype(int)


@pytest.mark.parametrize("world", ["cpu", "gpu", "cheap"])
@pytest.mark.parametrize("running", [1, 2, 5, 16, 64])
def test_within_five_percent_of_the_best_fixed_strategy(running, world):
    selector = CostAware("eagle", 8)
    reached = speed(selector, running, world, 200, steps_at(running))
    assert reached >= 0.95 * max(1.0, best_fixed(running, world))
    assert reached >= 0.98


@pytest.mark.parametrize("running", [1, 4, 32])
def test_a_useless_drafter_costs_two_percent_at_most(running):
    selector = CostAware("eagle", 8)
    assert speed(selector, running, "useless", 300, 2500) >= 0.98


@pytest.mark.parametrize("world", ["cpu", "gpu", "cheap", "useless"])
def test_whole_rollouts_with_a_long_tail(world):
    selector, engine = CostAware("eagle", 8), SpecWorld(seed=1, **WORLDS[world])
    first, *later = (engine.drain(selector, lengths(i)) for i in range(5))
    assert first[1] / first[0] > 0.8  # the price of finding out
    spent, plain = np.array(later).sum(0)
    assert plain / spent > {"cpu": 1.02, "gpu": 2.5, "cheap": 1.0, "useless": 0.975}[world]


def test_a_drafter_that_turns_bad_is_dropped_and_taken_up_again():
    selector, world = CostAware("eagle", 8), SpecWorld(seed=3)
    world.start([1 << 40])
    plain = float(cpu_seconds(1, 1))

    def gain(steps):
        tokens, seconds = world.run(selector, steps)
        return tokens / seconds * plain

    assert gain(500) > 1.7
    world.quality = 0.02
    gain(300)
    assert gain(900) > 0.97
    world.quality = 1.0
    gain(2500)
    assert gain(300) > 1.7


@pytest.mark.parametrize("running", [1, 4, 16])
def test_bookkeeping_of_steps_with_drafts_is_weighed(running):
    """What a step with drafts takes beyond its forward, where it costs more than drafts gain."""
    overhead = 2.5 * float(cpu_seconds(running, running))
    world, selector = SpecWorld(seed=7, overhead=overhead), CostAware("eagle", 8)
    world.run(selector, 200, running)
    tokens, seconds = world.run(selector, 1500)
    assert tokens / seconds * float(cpu_seconds(running, running)) / running >= 0.98


def test_plain_steps_among_drafts_are_not_taken_for_what_plain_decoding_costs():
    """The first one finds the caches full of the drafter's data. A drafter that loses looks as if it paid."""
    world, selector = SpecWorld(seed=8, cold=2.5, quality=0.55), CostAware("eagle", 8)
    world.run(selector, 400, 4)
    tokens, seconds = world.run(selector, 1500)
    assert tokens / seconds * float(cpu_seconds(4, 4)) / 4 >= 0.98


def test_rests_only_where_drafting_is_off_and_plain_decoding_known():
    selector, world = CostAware("eagle", 8), SpecWorld(quality=0.02)
    world.start([1 << 40] * 4)
    world.step(selector)
    assert selector.rest(4) == 0
    for _ in range(300):
        world.step(selector)
    while selector.select(4).kind != "none":
        world.step(selector)
    regime = selector._regimes[3]
    regime.waited, waits = 0, regime.patience
    rests = [selector.rest(4) for _ in range(waits)]
    assert rests[0] > 0 and sum(rests) < waits  # wakes up for the next trial


def test_plain_steps_come_first_then_drafts():
    selector, world = CostAware("eagle", 8), SpecWorld()
    world.start([1 << 40] * 4)
    kinds = [world.step(selector)[0].kind for _ in range(12)]
    assert kinds == ["none"] * 5 + ["eagle"] * 7


def test_while_drafting_plain_steps_are_measured_now_and_then():
    selector, world = CostAware("eagle", 8), SpecWorld()
    world.start([1 << 40])
    kinds = [world.step(selector)[0].kind for _ in range(1000)]
    assert 6 <= kinds[100:].count("none") <= 24


def test_a_token_must_promise_more_where_rows_cost_more():
    """On a CPU a row costs a larger share of a step the more requests run; on a GPU below the ridge it is free."""
    least = {}
    for name, running in (("cpu", 1), ("cpu", 16), ("gpu", 16)):
        selector, world = CostAware("eagle", 8), SpecWorld(seed=5, **WORLDS[name])
        world.run(selector, 150, running)
        chosen = [selector.select(running) for _ in range(200)]
        drafting = [s for s in chosen if s.kind == "eagle"]
        least[name, running] = drafting[0].min_survival
    assert least["cpu", 1] < 0.65 < least["cpu", 16] <= 0.95
    assert least["gpu", 16] < 0.15


def test_select_changes_nothing_that_decides():
    """Ranks of a tensor-parallel group may ask without using the answer."""
    selector, other = CostAware("eagle", 8), CostAware("eagle", 8)
    for s in (selector, other):
        SpecWorld(seed=2).run(s, 60, 4)
    for _ in range(50):
        selector.select(4)
    worlds = [SpecWorld(seed=9) for _ in range(2)]
    rates = [w.run(s, 200, 4) for w, s in zip(worlds, (selector, other), strict=True)]
    assert rates[0][0] / rates[0][1] == pytest.approx(rates[1][0] / rates[1][1], rel=0.05)


def test_follows_the_strategy_of_another_rank():
    """Rank 0 of a tensor-parallel group decides; the others' clocks may have told them otherwise."""
    leader, follower = CostAware("eagle", 8), CostAware("eagle", 8)
    survival, depths = np.array([0.9, 0.8, 0.9], np.float32), np.array([1, 2, 1], np.int32)
    disagreed = 0
    for step in range(400):
        running = 64 >> step // 60
        strategy, other = leader.select(running), follower.select(running)
        disagreed += strategy.kind == "eagle" != other.kind
        counts = np.bincount([0, 0, min(1, running - 1)], minlength=running).astype(np.int32)
        rows, tokens, drafting = running, 1, 0.0
        if strategy.kind != "none":
            keep, _ = (s.admit(strategy, running, survival, depths, counts, None) for s in (leader, follower))
            rows, tokens, drafting = running + int(keep.sum()), 3, 1e-5
        emitted = np.full(running, tokens, np.int32)
        leader.observe(strategy, running, rows, emitted, drafting, 1e-4 + 1e-6 * rows)
        follower.observe(strategy, running, rows, emitted, 100 * drafting, 1e-4 + 1e-6 * rows)
    assert disagreed > 100


def test_one_slow_step_does_not_end_drafting():
    selector, world = CostAware("eagle", 8), SpecWorld(noise=0.0, outliers=0.0)
    world.run(selector, 200, 1)
    strategy = selector.select(1)
    selector.observe(strategy, 1, 3, np.array([2], np.int32), 50e-6, 1.0)
    selector.observe(strategy, 1, 3, np.array([2], np.int32), 1.0, 400e-6)
    assert selector.select(1).kind == "eagle"
    assert speed(selector, 1, "cpu", 0, 200) > 1.6


def test_trees_are_admitted_by_survival_alone():
    """At a batch of one a sibling near the root goes before a deep node of the trunk."""
    selector = CostAware("eagle", 4, topk=2)
    for _ in range(6):
        selector.observe(NO_DRAFT, 1, 1, np.array([1], np.int32), 0.0, 200e-6)
    for rows in (3, 5, 7) * 4:
        strategy = selector.select(1)
        selector.observe(strategy, 1, rows, np.array([2], np.int32), 10e-6, 200e-6 + rows * 20e-6)
    strategy = selector.select(1)
    assert (strategy.kind, strategy.topk) == ("eagle", 2)
    survival = np.array([0.6, 0.4, 0.01, 0.35, 0.02], np.float32)
    depths, parents = np.array([1, 2, 3, 1, 2], np.int32), np.array([-1, 0, 1, -1, 0], np.int32)
    keep = selector.admit(strategy, 1, survival, depths, np.array([5], np.int32), parents)
    np.testing.assert_array_equal(keep, [True, True, False, True, False])


def test_drafts_stay_short_where_the_drafter_does_not_stop_itself():
    """Block verification: the survival of a position is the same in every step, and chains are as long as asked."""
    selector, world = CostAware("eagle", 8), SpecWorld(seed=4, by_position=True)
    world.run(selector, 400, 1)
    drafted = [world.step(selector) for _ in range(100)]
    lengths_asked = [s.draft_len for s, _ in drafted if s.kind == "eagle"]
    admitted = [int(keep.sum()) for s, keep in drafted if s.kind == "eagle"]
    assert lengths_asked and max(lengths_asked) <= max(admitted) + 2 < 8


def test_state_survives_a_round_trip_through_json():
    selector, world = CostAware("eagle", 8), SpecWorld(seed=6)
    world.drain(selector, lengths(0))
    world.drain(selector, lengths(1))
    other = CostAware("eagle", 8)
    other.load_state_dict(json.loads(json.dumps(selector.state_dict())))
    first, second = other.select(1), selector.select(1)
    assert first.kind == second.kind == "eagle"  # nothing is measured again
    assert speed(other, 1, "cpu", 0, 600) == pytest.approx(speed(selector, 1, "cpu", 0, 600), rel=0.08)


def test_state_of_another_selector_or_drafter_is_left_alone():
    trained = CostAware("eagle", 8)
    SpecWorld().run(trained, 60, 2)
    for state in (trained.state_dict(), {"selector": "beg_mab"}):
        other = CostAware("suffix", 8)
        other.load_state_dict(state)
        assert not other.step_costs.is_known and other.select(2) == NO_DRAFT
