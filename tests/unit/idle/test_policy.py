from dataclasses import replace

import numpy as np
import pytest

from megatron_tlt.config.idle import IdleSection
from megatron_tlt.idle.policy import (
    Action,
    BusyReplica,
    IdlePolicy,
    IdleView,
    expected_wait,
    has_changed,
    share_of_queue,
    tokens_left,
)
from megatron_tlt.idle.state import RankState

POLICY = IdlePolicy(min_tail_seconds=0.1)
GOOD = IdleView(
    RankState.IDLE, seconds_idle=1.0, expected_wait=2.0, micro_step_seconds=0.05, samples_available=9
)
WAIT, TRAIN, STOP = Action.WAIT, Action.TRAIN, Action.STOP


@pytest.mark.parametrize(
    ("change", "action"),
    [
        ({}, TRAIN),
        ({"state": RankState.TRAINING}, TRAIN),
        ({"state": RankState.BUSY}, WAIT),
        ({"is_over": True}, STOP),
        ({"is_over": True, "is_disabled": True}, STOP),
        ({"is_disabled": True}, WAIT),
        ({"samples_available": 1}, TRAIN),
        ({"samples_available": 0}, WAIT),
        ({"samples_available": None}, TRAIN),
        # an expectation counts within max(min_tail, micro-step) of its time, before and after
        ({"expected_wait": 0.1}, TRAIN),
        ({"expected_wait": 0.099}, WAIT),
        ({"expected_wait": -0.099}, WAIT),
        ({"expected_wait": -0.101}, TRAIN),
        ({"expected_wait": 0.4, "micro_step_seconds": 0.5}, WAIT),
        ({"expected_wait": 0.4, "micro_step_seconds": None}, TRAIN),
        # without one, a wait that has lasted min_tail lasts as long again
        ({"expected_wait": None}, TRAIN),
        ({"expected_wait": None, "seconds_idle": 0.099}, WAIT),
        ({"expected_wait": -9.0, "seconds_idle": 0.05}, WAIT),
        ({"expected_wait": 3.0, "seconds_idle": 0.0}, TRAIN),
    ],
)
def test_decisions(change, action):
    assert POLICY.decide(replace(GOOD, **change)) is action


@pytest.mark.parametrize(
    ("change", "action"),
    [
        ({"is_over": True}, TRAIN),
        ({"is_over": True, "steps": 1}, TRAIN),
        ({"is_over": True, "steps": 2}, STOP),
        ({"is_over": True, "is_disabled": True}, STOP),
        ({"is_over": True, "samples_available": 0}, STOP),
        ({"expected_wait": 0.0}, TRAIN),  # too short a wait for more than what is due
        ({"expected_wait": 0.0, "steps": 2}, WAIT),
    ],
)
def test_steps_that_are_due_whether_a_rank_waits_or_not(change, action):
    assert replace(POLICY, min_steps_per_window=2).decide(replace(GOOD, **change)) is action


def test_the_policy_of_a_configuration():
    section = IdleSection(
        train_drafter=True,
        min_tail_seconds=0.3,
        min_steps_per_window=2,
    )
    assert IdlePolicy.of(section) == IdlePolicy(True, 0.3, 2)
    assert IdlePolicy.of(IdleSection()).decide(GOOD) is WAIT  # training is off


@pytest.mark.parametrize(
    ("busy", "wait"),
    [
        ([], 0.0),
        ([BusyReplica(100, 50)], 2.0),
        ([BusyReplica(100, 50), BusyReplica(90, 10)], 9.0),  # the slowest, not the longest
        ([BusyReplica(100, 50, age_seconds=0.5), BusyReplica(10, 10, age_seconds=0.9)], 1.5),
        ([BusyReplica(10, 10, age_seconds=3)], -2.0),
        ([BusyReplica(1000, 1), BusyReplica(10, 0)], None),  # one that is not known may be the slowest
    ],
)
def test_the_expected_wait(busy, wait):
    found = expected_wait(busy)
    assert found is None if wait is None else found == pytest.approx(wait)


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [(100, 81, False), (100, 80, True), (100, 119, False), (100, 120, True), (1, 2.9, False), (1, 3, True)],
)
def test_what_counts_as_a_change(old, new, changed):
    assert has_changed(old, new, share=0.2, floor=10) is changed


@pytest.mark.parametrize(
    ("queued", "running", "stolen"),
    [(0, 0, 0), (0, 64, 0), (1, 0, 1), (1, 64, 1), (40, 0, 20), (40, 16, 24), (5, 2, 3), (5, 100, 5)],
)
def test_a_thief_steals_what_lets_both_end_together(queued, running, stolen):
    assert share_of_queue(queued, running) == stolen


@pytest.mark.parametrize(
    ("running", "waiting", "lengths", "expected"),
    [
        ([], 2, [10.0, 30.0], 40.0),
        ([0, 0], 0, [10.0, 30.0], 40.0),  # twice the mean
        ([10], 0, [10.0, 30.0], 20.0),  # only the longer one is still possible
        ([30, 30], 0, [10.0, 30.0], 30.0),  # as long as any before: half as much again
        ([0, 28], 1, [10.0, 30.0], 42.0),
        ([0, 10], 0, [10.0, 90.0], 160.0),  # the longest of two holds both rows
    ],
)
def test_tokens_left(running, waiting, lengths, expected):
    assert tokens_left(np.array(running), waiting, np.array(lengths)) == pytest.approx(expected)
