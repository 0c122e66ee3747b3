"""Means over the trajectories of all ranks, whatever rank generated which."""

import pytest

from megatron_tlt.trainer.metrics import combined
from megatron_tlt.trainer.turn_metrics import failure_warning, means_of_sums, turn_sums
from megatron_tlt.types import Prompt, Sample, SampleGroup


def group(*turns):
    """One trajectory for each list of rewards; None: its environment failed."""
    samples = [
        Sample(7, i, [1], [0.0], "", "env", 0, turn_rewards=rewards or [], failure=None if rewards else "timeout")
        for i, rewards in enumerate(turns)
    ]
    return SampleGroup(Prompt(7, "q", (1,), ""), samples)


def test_means_are_of_all_trajectories():
    ranks = [[group([1.0, 2.0], [0.5])], [group([0.0, 0.0, 3.0]), group(None)]]
    whole = combined([turn_sums(groups) for groups in ranks])
    means = means_of_sums(whole)
    assert whole == {"env/failures": 1.0}
    assert means == {
        "env/turns": 6 / 4,
        "env/reward": pytest.approx(6.5 / 4),
        "env/reward/turn_1": 0.5,
        "env/reward/turn_2": 1.0,
        "env/reward/turn_3": 3.0,
    }


def test_a_trajectory_that_was_cut_in_its_first_turn_counts():
    cut = SampleGroup(Prompt(1, "q", (1,), ""), [Sample(1, 0, [1], [0.0], "", "length", 0)])
    for groups, mean in (([cut], 0.0), ([cut, group([1.0])], 0.5), ([], 0.0)):
        whole = turn_sums(groups)
        assert means_of_sums(whole) | {"env/reward/turn_1": 0} == {
            "env/turns": mean, "env/reward": mean, "env/reward/turn_1": 0
        }  # fmt: skip
        assert whole == {"env/failures": 0.0}


def test_failures_are_named():
    assert failure_warning([group([1.0])]) is None
    warning = failure_warning([group([1.0], None, None)])
    assert warning.startswith("2 trajectories") and warning.endswith("Prompt 7, sample 1: timeout")
