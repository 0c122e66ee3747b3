from dataclasses import replace

import numpy as np
import pytest

from megatron_tlt.config.idle import IdleSection
from megatron_tlt.idle.policy import Action, IdleView, RecentWindows, decide, tokens_left

SECTION = IdleSection(train_drafter=True, min_tail_seconds=0.1)
GOOD = IdleView(seconds_idle=1.0, samples_available=9)
WAIT, TRAIN, PRE_ROLL, STOP = Action.WAIT, Action.TRAIN, Action.PRE_ROLL, Action.STOP


@pytest.mark.parametrize(
    ("change", "action"),
    [
        ({"samples_available": 1}, TRAIN),
        ({"samples_available": 0}, WAIT),
        ({"seconds_idle": 0.1}, TRAIN),
        ({"seconds_idle": 0.099}, WAIT),
        ({"seconds_idle": 0.5, "step_seconds": 0.5}, TRAIN),
        ({"seconds_idle": 0.5, "step_seconds": 0.51}, WAIT),  # the ranks would wait for its end
        ({"can_pre_roll": True, "training_share": 0.24}, TRAIN),
        ({"can_pre_roll": True, "training_share": 0.25}, PRE_ROLL),
        ({"can_pre_roll": True, "step_seconds": 0.5, "usual_seconds": 0.5}, TRAIN),
        ({"can_pre_roll": True, "step_seconds": 0.51, "usual_seconds": 0.5}, PRE_ROLL),
        ({"can_pre_roll": True, "samples_available": 0}, PRE_ROLL),
        ({"can_pre_roll": True, "seconds_idle": 0.099}, WAIT),
        ({"can_pre_roll": True, "is_over": True}, STOP),
    ],
)
def test_decisions(change, action):
    assert decide(SECTION, replace(GOOD, **change)) is action


@pytest.mark.parametrize(
    ("change", "action"),
    [
        ({"is_over": True}, TRAIN),
        ({"is_over": True, "steps": 1}, TRAIN),
        ({"is_over": True, "steps": 2}, STOP),
        ({"is_over": True, "samples_available": 0}, STOP),
        ({"seconds_idle": 0.0}, TRAIN),  # too short a wait for more than what is due
        ({"seconds_idle": 0.0, "steps": 2}, WAIT),
    ],
)
def test_steps_that_are_due_whether_a_rank_waits_or_not(change, action):
    assert decide(SECTION.model_copy(update={"min_steps_per_window": 2}), replace(GOOD, **change)) is action


def test_recent_windows_count_most():
    recent = RecentWindows()
    assert (recent.training_share(0.0, 0.0), recent.usual_seconds) == (0.0, 0.0)
    for idle, trained, windows in ((100.0, 70.0, 20), (1.0, 0.1, 60), (100.0, 0.0, 60)):
        for _ in range(windows):
            recent.add(idle, trained)
        assert recent.usual_seconds == pytest.approx(idle, rel=0.2)
        assert recent.training_share(idle, trained) == pytest.approx(trained / idle, abs=0.1)


def test_it_does_not_train_where_training_is_off():
    assert decide(IdleSection(), GOOD) is WAIT


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
