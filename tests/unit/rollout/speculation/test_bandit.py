"""The bandit: unseen arms first, the best arm of each bucket in the end, decaying exploration, state."""

from collections import Counter

import numpy as np
import pytest

from megatron_tlt.rollout.speculation.bandit import BucketedEpsilonGreedy
from megatron_tlt.types import NO_DRAFT, DraftStrategy
from tests.helpers.spec_world import measured

ARMS = [NO_DRAFT, *(DraftStrategy("trained", length) for length in (2, 4, 6))]


def bandit(epsilon=0.1):
    return BucketedEpsilonGreedy(ARMS, (1, 3, 9), epsilon)


def play(selector, running, seconds, rng=None, times=1):
    """Steps in which arm `name` takes `seconds[name]` and every request emits two tokens. Returns the names."""
    names = []
    for _ in range(times):
        arm = selector.select(running)
        took = seconds[arm.name] * (rng.lognormal(0, 0.3) if rng is not None else 1.0)
        selector.record(measured(arm, running, 2 * running, np.full(running, 2, np.int32), 0.3 * took, 0.7 * took))
        names.append(arm.name)
    return names


EQUAL = {arm.name: 1.0 for arm in ARMS}
NAMES = [arm.name for arm in ARMS]


def test_arms_without_rewards_come_first_in_every_bucket():
    selector = bandit(epsilon=1.0)
    assert play(selector, 5, EQUAL, times=4) == NAMES
    assert play(selector, 1, EQUAL, times=4) == NAMES
    assert play(selector, 40, EQUAL, times=4) == NAMES


def test_arms_that_draft_are_played_again_with_a_new_drafter():
    selector = bandit(epsilon=0.0)
    slow = {**dict.fromkeys(NAMES, 9.0), NAMES[0]: 1.0}
    play(selector, 5, slow, times=8)
    selector.drafter_changed()
    assert play(selector, 5, slow, times=5) == [*NAMES[1:], NAMES[0], NAMES[0]]


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
    selector, rng = bandit(), np.random.default_rng(0)
    play(selector, 4, {**EQUAL, NAMES[1]: 0.6}, rng, 300)
    changed = {**EQUAL, NAMES[1]: 1.6}
    play(selector, 4, changed, rng, 200)
    assert Counter(play(selector, 4, changed, rng, 100))[NAMES[1]] < 20


def test_one_outlier_changes_no_median():
    selector = bandit(epsilon=0.0)
    play(selector, 4, {**EQUAL, NAMES[2]: 0.8}, times=40)
    selector.record(measured(ARMS[0], 4, 4, np.full(4, 2, np.int32), 0.0, 1e-9))
    selector.record(measured(ARMS[0], 4, 4, np.full(4, 2, np.int32), 0.0, 1.0))
    selector.record(measured(ARMS[0], 4, 4, np.full(4, 2, np.int32), 0.0, 1.0))
    assert selector.select(4) == ARMS[2]


def test_reward_is_the_steps_own_tokens():
    """An arm that emits more in the same time wins, however fast its bare steps are."""
    selector = bandit(epsilon=0.0)
    for arm, tokens in zip(ARMS, (1, 2, 5, 4), strict=True):
        selector.record(measured(arm, 4, 8, np.array([tokens, 1, 1, 1], np.int32), 0.1, 0.9))
    assert selector.select(4) == ARMS[2]


def test_exploration_decays_with_the_steps_of_its_own_bucket():
    selector = bandit(epsilon=0.4)
    play(selector, 4, EQUAL, times=100)
    assert selector.epsilon(4) == pytest.approx(0.4 * 0.995**100)
    assert selector.epsilon(1) == 0.4
    names = []
    for _ in range(2000):
        names += play(selector, 4, EQUAL)
        selector.policy_changed()
    explored = [name for name in names if name != NAMES[0]]
    assert 0.25 * 2000 < len(explored) < 0.35 * 2000  # a quarter of the draws falls on the best arm
    assert set(explored) == set(NAMES[1:])


def test_an_arm_that_has_lost_is_tried_again_behind_weight_syncs():
    """A suffix drafter without history loses in the first rollouts."""
    selector = bandit(epsilon=0.4)
    play(selector, 4, {**dict.fromkeys(NAMES, 9.0), NAMES[0]: 1.0}, times=3000)
    grown = {**EQUAL, NAMES[3]: 0.5}
    assert set(play(selector, 4, grown, times=300)) == {NAMES[0]}
    for _ in range(5):
        selector.policy_changed()
        assert selector.epsilon(4) == 0.4
        names = play(selector, 4, grown, times=300)
    assert Counter(names)[NAMES[3]] > 200
