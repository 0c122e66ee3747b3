from dataclasses import replace

import pytest

from megatron_tlt.config.idle import IdleSection
from megatron_tlt.idle.policy import (
    Action,
    BusyReplica,
    IdlePolicy,
    IdleView,
    expected_tail,
    has_changed,
    share_of_queue,
)
from megatron_tlt.idle.state import RankState

POLICY = IdlePolicy(min_tail_seconds=0.1, max_steps_per_window=5, min_samples=2)
GOOD = IdleView(
    RankState.IDLE, seconds_idle=1.0, expected_tail=2.0, micro_step_seconds=0.05, samples_available=9
)
WAIT, TRAIN, STOP = Action.WAIT, Action.TRAIN, Action.STOP


@pytest.mark.parametrize(
    ("change", "action", "reason"),
    [
        ({}, TRAIN, "not expected to be done soon"),
        ({"state": RankState.TRAINING}, TRAIN, ""),
        ({"state": RankState.BUSY}, WAIT, "requests of its own"),
        ({"is_over": True}, STOP, "every rank is done"),
        ({"is_over": True, "is_disabled": True}, STOP, "every rank is done"),
        ({"is_disabled": True}, WAIT, "failed"),
        ({"steps": 4}, TRAIN, ""),
        ({"steps": 5}, WAIT, "5 micro-steps"),
        ({"samples_available": 2}, TRAIN, ""),
        ({"samples_available": 1}, WAIT, "1 sequences"),
        ({"samples_available": None}, TRAIN, ""),
        # an expectation counts within max(min_tail, micro-step) of its time, before and after
        ({"expected_tail": 0.1}, TRAIN, ""),
        ({"expected_tail": 0.099}, WAIT, "expected to end in 0.099 s"),
        ({"expected_tail": -0.099}, WAIT, "expected to end"),
        ({"expected_tail": -0.101}, TRAIN, ""),
        ({"expected_tail": 0.4, "micro_step_seconds": 0.5}, WAIT, "expected to end"),
        ({"expected_tail": 0.4, "micro_step_seconds": None}, TRAIN, ""),
        # without one, a wait that has lasted min_tail lasts as long again
        ({"expected_tail": None}, TRAIN, ""),
        ({"expected_tail": None, "seconds_idle": 0.099}, WAIT, "may be short"),
        ({"expected_tail": -9.0, "seconds_idle": 0.05}, WAIT, "may be short"),
        ({"expected_tail": 3.0, "seconds_idle": 0.0}, TRAIN, ""),
    ],
)
def test_decisions(change, action, reason):
    decision = POLICY.decide(replace(GOOD, **change))
    assert decision.action is action
    assert reason in decision.reason


def test_training_can_be_off_and_limits_be_none():
    assert IdlePolicy(train_drafter=False).decide(GOOD).action is WAIT
    assert IdlePolicy(max_steps_per_window=0).decide(replace(GOOD, steps=10**6)).action is TRAIN


def test_the_policy_of_a_configuration():
    section = IdleSection(train_drafter=True, min_tail_seconds=0.3, max_steps_per_window=7, min_samples=3)
    assert IdlePolicy.of(section) == IdlePolicy(True, 0.3, 7, 3)
    assert IdlePolicy.of(IdleSection()).decide(GOOD).action is WAIT


@pytest.mark.parametrize(
    ("busy", "tail"),
    [
        ([], 0.0),
        ([BusyReplica(100, 50)], 2.0),
        ([BusyReplica(100, 50), BusyReplica(90, 10)], 9.0),  # the slowest, not the longest
        ([BusyReplica(100, 50, age_seconds=0.5), BusyReplica(10, 10, age_seconds=0.9)], 1.5),
        ([BusyReplica(10, 10, age_seconds=3)], -2.0),
        ([BusyReplica(1000, 1), BusyReplica(10, 0)], None),  # one that is not known may be the slowest
    ],
)
def test_the_expected_tail(busy, tail):
    found = expected_tail(busy)
    assert found is None if tail is None else found == pytest.approx(tail)


@pytest.mark.parametrize(
    ("told", "now", "changed"),
    [(100, 81, False), (100, 80, True), (100, 119, False), (100, 120, True), (1, 2.9, False), (1, 3, True)],
)
def test_what_counts_as_a_change(told, now, changed):
    assert has_changed(told, now, share=0.2, floor=10) is changed


def test_where_a_unit_has_several_opinions_the_highest_counts():
    assert max(Action.WAIT, Action.TRAIN, Action.STOP) is Action.STOP
    assert max(Action.STOP, Action.DISABLE) is Action.DISABLE


@pytest.mark.parametrize(
    ("queued", "running", "given"),
    [(0, 0, 0), (0, 64, 0), (1, 0, 1), (1, 64, 1), (40, 0, 20), (40, 16, 24), (5, 2, 3), (5, 100, 5)],
)
def test_a_dry_replica_gets_what_lets_both_end_together(queued, running, given):
    assert share_of_queue(queued, running) == given
