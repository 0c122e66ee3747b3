"""The cost-aware selector in a simulated engine: near the best fixed strategy everywhere, never much below plain."""

import json
from functools import cache

import numpy as np
import pytest

from megatron_tlt.rollout.spec.cost_aware import CostModelSelector
from megatron_tlt.rollout.spec.selector import FixedSelector
from megatron_tlt.types import NO_DRAFT, DraftStrategy
from tests.helpers.spec_world import SpecWorld, gpu_seconds, linear_seconds, measured, tiled_seconds

GPU = {"step_seconds": gpu_seconds, "draft_call": 4e-4, "draft_row": 2e-6, "catch_up_row": 2e-6}
WORLDS = {
    "stairs": {},  # a CPU whose kernels take four rows
    "tiles": {"step_seconds": tiled_seconds},
    "gpu": GPU,
    "cheap": {
        "draft_call": 5e-6,
        "draft_row": 1e-6,
        "catch_up_row": 0.0,
        "quality": 0.6,
    },  # as a suffix drafter
    "noisy": {"step_seconds": tiled_seconds, "noise": 0.15, "outliers": 0.05},
}
# As measured at 4 requests on a core with a small cache (docs/log.md): it takes ten steps.
COLD = (2.0, 1.9, 1.75, 1.55, 1.4, 1.3, 1.25, 1.2, 1.1, 1.03)
LOSING = {
    "linear": {"step_seconds": linear_seconds},  # every row costs as much
    "useless": {"quality": 0.02},
    "useless gpu": {**GPU, "quality": 0.02},
    "bookkeeping": {"overhead": 2e-3},
    "noisy": {"step_seconds": linear_seconds, "noise": 0.15, "outliers": 0.05},
}


def speed(selector, running, world, warm, steps, seed=0):
    """Throughput over plain decoding's, after `warm` steps."""
    world.start([1 << 40] * running)
    world.run(selector, warm)
    tokens, seconds = world.run(selector, steps)
    return tokens / seconds * float(world.step_seconds(running, running)) / running


@cache
def best_fixed(running, name):
    fixed = [FixedSelector(DraftStrategy("eagle", length)) for length in (1, 2, 3, 5, 8)]
    steps = max(300, 2000 // running)
    return max(1.0, *(speed(s, running, SpecWorld(**WORLDS[name]), 100, steps) for s in fixed))


def lengths(seed, count=64):
    """A long tail of answers."""
    drawn = np.random.default_rng(seed).lognormal(4.2, 0.7, count)
    return np.clip(drawn, 10, 256).astype(int)


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("running", [1, 2, 5, 16, 64])
def test_within_five_percent_of_the_best_fixed_strategy(running, name):
    steps = 1500
    reached = speed(CostModelSelector("eagle", 8), running, SpecWorld(seed=1, **WORLDS[name]), 3000, steps)
    assert reached >= 0.95 * best_fixed(running, name)


@pytest.mark.parametrize("name", LOSING)
@pytest.mark.parametrize("running", [1, 4, 32])
def test_where_drafting_loses_it_costs_two_percent_at_most(running, name):
    selector, world = CostModelSelector("eagle", 8), SpecWorld(seed=1, **LOSING[name])
    assert speed(selector, running, world, 0, 4000) >= 0.93  # the price of finding out
    assert speed(selector, running, world, 4000, 8000) >= 0.98


@pytest.mark.parametrize(
    ("name", "least"), [("stairs", 0.96), ("gpu", 2.8), ("cheap", 0.96), ("useless", 0.975)]
)
def test_whole_rollouts_with_a_long_tail(name, least):
    """About 40 steps in each regime of each rollout: it takes several rollouts to find out."""
    total = np.zeros(2)
    for seed in (0, 1):
        selector, engine = CostModelSelector("eagle", 8), SpecWorld(seed=seed, **(WORLDS | LOSING)[name])
        first, *later = (engine.drain(selector, lengths(i)) for i in range(16))
        assert first[1] / first[0] > 0.55  # the price of finding out
        total += np.array(later[7:]).sum(0)
    spent, plain = total
    assert plain / spent > least


@pytest.mark.parametrize("name", ["gpu", "useless"])
def test_batch_sizes_that_change_at_every_step(name):
    selector, world = CostModelSelector("eagle", 8), SpecWorld(seed=2, **(WORLDS | LOSING)[name])
    rng = np.random.default_rng(0)
    spent = plain = 0.0
    for step in range(4000):
        running = int(rng.choice([3, 4, 7, 8, 20]))
        world.lengths, world.behind = np.full(running, 1 << 40), np.resize(world.behind, running)
        world.level = np.resize(world.level, running)
        tokens, seconds = world.run(selector, 1)
        if step >= 1500:
            spent += seconds
            plain += tokens / running * float(world.step_seconds(running, running))
    assert plain / spent > {"gpu": 3.0, "useless": 0.97}[name]


def test_a_drafter_that_turns_bad_is_dropped_and_taken_up_again():
    selector, world = CostModelSelector("eagle", 8), SpecWorld(seed=3)
    assert speed(selector, 1, world, 500, 1000) > 1.7
    world.quality = 0.02
    assert speed(selector, 1, world, 1000, 4000) > 0.97
    world.quality = 1.0
    assert speed(selector, 1, world, 12000, 1000) > 1.6


def test_plain_steps_after_drafts_are_not_taken_for_what_plain_decoding_costs():
    """They find the caches full of the drafter's data. A drafter that loses looks as if it paid."""
    for seed in range(4):
        world = SpecWorld(seed=seed, step_seconds=tiled_seconds, cold=COLD, quality=0.7)
        assert speed(CostModelSelector("eagle", 8), 4, world, 400, 4000) >= 0.98


def test_plain_decoding_comes_first_then_drafts():
    selector, world = CostModelSelector("eagle", 8), SpecWorld()
    world.start([1 << 40] * 4)
    kinds = [world.step(selector)[0].kind for _ in range(30)]
    assert kinds == ["none"] * 20 + ["eagle"] * 10


def test_a_hybrid_plays_its_trained_part_alone_too():
    assert [
        (a.kind, a.draft_len, a.min_cumulative_acceptance > 0) for a in CostModelSelector("hybrid", 11).arms
    ] == [
        ("none", 0, False),
        *[(kind, 11, True) for kind in ("hybrid", "eagle")],
        ("hybrid", 11, False),
        ("eagle", 5, False),
        ("eagle", 2, False),
    ]
    lengths = [a.draft_len for a in CostModelSelector("suffix", 3, 2).arms if a.topk == 2]
    assert lengths == [3, 3, 2]  # never more than configured


def learned(draft_len=8, topk=1, seconds=lambda rows: 200e-6 + 20e-6 * rows):
    """A selector that knows what steps of one request cost, and of no gain by drafting."""
    selector = CostModelSelector("eagle", draft_len, topk)
    for _ in range(40):
        for rows in range(1, 11):
            selector.step_costs.observe(1, rows, seconds(rows))
    return selector


def priced(selector):
    return next(arm for arm in selector.arms if arm.min_cumulative_acceptance)


def test_drafts_are_fed_up_to_the_edge_of_a_tile():
    """Rows up to six are free and further ones dear: five drafted tokens, however unlikely the last ones are."""
    selector = learned(seconds=lambda rows: 200e-6 if rows <= 6 else 600e-6)
    cumulative_acceptance = np.array([0.5, 0.3, 0.2, 0.1, 0.08, 0.07, 0.06, 0.05], np.float32)
    depths, counts = np.arange(1, 9, dtype=np.int32), np.array([8], np.int32)
    keep = selector.prune(priced(selector), 1, cumulative_acceptance, depths, counts, None)
    assert keep.tolist() == [True] * 5 + [False] * 3
    whole = DraftStrategy("eagle", 8)
    assert selector.prune(whole, 1, cumulative_acceptance, depths, counts, None).all()


def test_trees_are_admitted_by_cumulative_acceptance_alone():
    """At a batch of one a sibling near the root goes before a deep node of the trunk."""
    selector = learned(4, topk=2)
    cumulative_acceptance = np.array([0.6, 0.4, 0.01, 0.35, 0.02], np.float32)
    depths, parents = np.array([1, 2, 3, 1, 2], np.int32), np.array([-1, 0, 1, -1, 0], np.int32)
    keep = selector.prune(
        priced(selector), 1, cumulative_acceptance, depths, np.array([5], np.int32), parents
    )
    np.testing.assert_array_equal(keep, [True, True, False, True, False])


def test_a_token_must_promise_more_where_rows_cost_more():
    least = {}
    for name, world in (("stairs", {}), ("gpu", GPU)):
        selector = CostModelSelector("eagle", 8)
        SpecWorld(seed=5, **world).run(selector, 1500, 16)
        strategies = selector._priced(16).strategies
        least[name] = next(s.min_cumulative_acceptance for s in strategies if s.min_cumulative_acceptance)
    assert least["gpu"] < 0.15 and 0.5 < least["stairs"] <= 0.95


def test_follows_the_strategy_of_another_rank():
    """Rank 0 of a tensor-parallel group decides; the others' clocks may have told them otherwise."""
    leader, follower = CostModelSelector("eagle", 8), CostModelSelector("eagle", 8)
    cumulative_acceptance, depths = np.array([0.9, 0.8, 0.9], np.float32), np.array([1, 2, 1], np.int32)
    disagreed = 0
    for step in range(2000):
        running = 64 >> step // 300
        strategy, other = leader.select(running), follower.select(running)
        disagreed += strategy.kind != other.kind
        counts = np.bincount([0, 0, min(1, running - 1)], minlength=running).astype(np.int32)
        rows, tokens, drafting = running, 1, 0.0
        if strategy.kind != "none":
            keep, _ = (
                s.prune(strategy, running, cumulative_acceptance, depths, counts, None)
                for s in (leader, follower)
            )
            rows, tokens, drafting = running + int(keep.sum()), 3, 1e-5
        emitted = np.full(running, tokens, np.int32)
        leader.record(measured(strategy, running, rows, emitted, drafting, 1e-4 + 1e-6 * rows))
        follower.record(measured(strategy, running, rows, emitted, 100 * drafting, 1e-4 + 1e-6 * rows))
    assert disagreed > 10


def test_one_slow_step_does_not_end_drafting():
    selector, world = CostModelSelector("eagle", 8), SpecWorld(noise=0.0, outliers=0.0)
    assert speed(selector, 1, world, 1000, 500) > 1.6
    while selector._races[1].is_trial:
        world.step(selector)
    strategy = selector.select(1)
    selector.record(measured(strategy, 1, 3, np.array([2], np.int32), 50e-6, 1.0))
    selector.record(measured(strategy, 1, 3, np.array([2], np.int32), 1.0, 400e-6))
    assert selector.select(1).kind == "eagle"
    assert speed(selector, 1, world, 0, 500) > 1.6


def test_equal_inputs_give_equal_decisions():
    played = []
    for _ in range(2):
        selector, world = CostModelSelector("eagle", 8), SpecWorld(seed=9)
        world.start(lengths(1))
        played.append([])
        while len(world.lengths):
            played[-1].append(world.step(selector)[0])
    assert played[0] == played[1]


def test_state_survives_a_round_trip_through_json():
    selector, world = CostModelSelector("eagle", 8), SpecWorld(seed=6)
    for i in range(4):
        world.drain(selector, lengths(i))
    other = CostModelSelector("eagle", 8)
    other.load_state_dict(json.loads(json.dumps(selector.state_dict())))
    assert other.state_dict() == selector.state_dict()
    assert {r: other.select(r).name for r in (1, 5, 40)} == {
        r: selector._priced(r).strategies[selector._race(r).best].name for r in (1, 5, 40)
    }


def test_state_of_another_selector_version_or_drafter_is_left_alone():
    trained = CostModelSelector("eagle", 8)
    SpecWorld().run(trained, 60, 2)
    state = trained.state_dict()
    before = state.copy()
    before.pop("version")
    for kind, length, saved in (
        ("suffix", 8, state),
        ("eagle", 6, state),
        ("eagle", 8, {"selector": "beg_mab"}),
        ("eagle", 8, before),
    ):
        other = CostModelSelector(kind, length)
        other.load_state_dict(saved)
        assert not other.step_costs.is_known and other.select(2) == NO_DRAFT
