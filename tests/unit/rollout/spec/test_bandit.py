"""The bandit: unseen arms first, the best arm of each bucket in the end, decaying exploration, state."""

import json
from collections import Counter

import numpy as np
import pytest

from megatron_tlt.errors import ConfigError
from megatron_tlt.rollout.spec.bandit import BucketedEpsilonGreedy, parse_arm
from megatron_tlt.types import NO_DRAFT
from tests.helpers.spec_world import measured

ARMS = [parse_arm(text, "eagle") for text in ("0_1_1", "2_1_3", "4_1_5", "6_2_12")]


def bandit(**kw):
    return BucketedEpsilonGreedy(ARMS, (1, 3, 9), **kw)


def play(selector, running, seconds, rng=None, times=1):
    """Steps in which arm `name` takes `seconds[name]` and every request emits two tokens. Returns the names."""
    names = []
    for _ in range(times):
        arm = selector.select(running)
        took = seconds[arm.name] * (rng.lognormal(0, 0.3) if rng is not None else 1.0)
        selector.record(
            measured(arm, running, 2 * running, np.full(running, 2, np.int32), 0.3 * took, 0.7 * took)
        )
        names.append(arm.name)
    return names


EQUAL = {arm.name: 1.0 for arm in ARMS}
NAMES = [arm.name for arm in ARMS]


def test_unseen_arms_come_first_in_every_bucket():
    selector = bandit(epsilon=1.0)
    assert play(selector, 5, EQUAL, times=4) == NAMES
    assert play(selector, 1, EQUAL, times=4) == NAMES
    assert play(selector, 40, EQUAL, times=4) == NAMES


def test_finds_the_best_arm_of_each_bucket():
    selector, rng = bandit(), np.random.default_rng(0)
    small = {**EQUAL, NAMES[3]: 0.7}
    large = {**EQUAL, NAMES[0]: 0.7}
    play(selector, 2, small, rng, 300)
    play(selector, 20, large, rng, 300)
    assert Counter(play(selector, 2, small, rng, 200))[NAMES[3]] > 170
    assert Counter(play(selector, 20, large, rng, 200))[NAMES[0]] > 170
    assert selector.select(5) == ARMS[0]  # nothing is known of the bucket between


def test_follows_a_change_within_the_window():
    selector, rng = bandit(window=20, decay=1.0), np.random.default_rng(0)
    play(selector, 4, {**EQUAL, NAMES[1]: 0.6}, rng, 300)
    changed = {**EQUAL, NAMES[1]: 1.6}
    play(selector, 4, changed, rng, 200)
    assert Counter(play(selector, 4, changed, rng, 100))[NAMES[1]] < 20


def test_one_mad_measurement_changes_no_median():
    selector = bandit(epsilon=0.0)
    play(selector, 4, {**EQUAL, NAMES[2]: 0.8}, times=40)
    selector.record(measured(ARMS[0], 4, 4, np.full(4, 2, np.int32), 0.0, 1e-9))
    selector.record(measured(ARMS[0], 4, 4, np.full(4, 2, np.int32), 0.0, 1.0))
    selector.record(measured(ARMS[0], 4, 4, np.full(4, 2, np.int32), 0.0, 1.0))
    assert selector.select(4) == ARMS[2]


def test_ties_go_to_the_arm_named_first():
    selector = bandit(epsilon=0.0)
    play(selector, 4, EQUAL, times=4)
    assert play(selector, 4, EQUAL, times=5) == [NAMES[0]] * 5


def test_reward_is_the_steps_own_tokens():
    """An arm that emits more in the same time wins, however fast its bare steps are."""
    selector = bandit(epsilon=0.0)
    for arm, tokens in zip(ARMS, (1, 2, 5, 4), strict=True):
        selector.record(measured(arm, 4, 8, np.array([tokens, 1, 1, 1], np.int32), 0.1, 0.9))
    assert selector.select(4) == ARMS[2]


def test_exploration_decays_with_the_steps_of_its_own_bucket():
    selector = bandit(epsilon=0.4, decay=0.99)
    play(selector, 4, EQUAL, times=100)
    assert selector.epsilon(4) == pytest.approx(0.4 * 0.99**100)
    assert selector.epsilon(1) == 0.4
    explored = [
        name for name in play(bandit(epsilon=0.4, decay=1.0), 4, EQUAL, times=2000)[4:] if name != NAMES[0]
    ]
    assert 0.25 * 2000 < len(explored) < 0.35 * 2000  # a quarter of the draws falls on the best arm
    assert set(explored) == set(NAMES[1:])


def test_deterministic_by_its_seed():
    runs = [play(bandit(epsilon=0.5, seed=seed), 4, EQUAL, times=60) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_select_without_observe_changes_nothing():
    selector = bandit(epsilon=1.0)
    play(selector, 4, EQUAL, times=10)
    assert len({selector.select(4).name for _ in range(20)}) == 1


def test_admits_as_many_nodes_as_the_arm_verifies():
    cumulative_acceptance = np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4], np.float32)
    counts = np.array([4, 2], np.int32)
    depths = np.array([1, 2, 3, 4, 1, 2], np.int32)
    keep = bandit().prune(ARMS[1], 2, cumulative_acceptance, depths, counts, None)
    np.testing.assert_array_equal(keep, [True, True, False, False, True, True])


def test_state_survives_a_round_trip_through_json():
    selector, other = (bandit(epsilon=0.3, window=10) for _ in range(2))
    rng = np.random.default_rng(0)
    play(selector, 4, EQUAL, rng, 30)
    other.load_state_dict(json.loads(json.dumps(selector.state_dict())))
    first, second = (play(s, 4, EQUAL, np.random.default_rng(5), 50) for s in (selector, other))
    assert first == second
    fresh = bandit()
    fresh.load_state_dict({"selector": "cost_aware"})
    assert fresh.select(4) == ARMS[0]


@pytest.mark.parametrize(
    "text",
    ["4_1", "a_1_2", "4_1_5_6", "", "0_1_2", "0_2_1", "33_1_4", "4_5_6", "4_0_3", "4_1_6", "4_1_1", "-1_1_1"],
)
def test_what_is_no_arm_is_refused_by_name(text):
    with pytest.raises(ConfigError, match=r"rollout\.speculation\.bandit\.arms"):
        parse_arm(text, "eagle")


def test_arms_and_buckets_are_checked():
    assert parse_arm("0_1_1", "eagle") == NO_DRAFT
    arm = parse_arm("6_2_12", "suffix", 0.1)
    assert (arm.kind, arm.draft_len, arm.topk, arm.num_verify_tokens, arm.min_cumulative_acceptance) == (
        "suffix",
        6,
        2,
        12,
        0.1,
    )
    for arms, thresholds, path in (
        ([], (1,), "arms"),
        (ARMS[:1] * 2, (1,), "arms"),
        (ARMS, (3, 3), "thresholds"),
    ):
        with pytest.raises(ConfigError, match=rf"rollout\.speculation\.bandit\.{path}"):
            BucketedEpsilonGreedy(arms, thresholds)
    late = BucketedEpsilonGreedy(ARMS, (4, 8))
    assert late.bucket(1) == late.bucket(4) == 0 and late.bucket(9) == 1
