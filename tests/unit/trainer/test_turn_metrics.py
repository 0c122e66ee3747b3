"""Means over the trajectories of all ranks, whatever rank generated which."""

import pytest

from megatron_tlt.observe.reduction import values_of
from megatron_tlt.trainer.metrics import _rollout_rates
from megatron_tlt.trainer.turn_metrics import failure_warning, turn_metrics, turn_rows
from megatron_tlt.types import Prompt, Sample, SampleGroup


def group(*turns):
    """One trajectory for each list of rewards; None: its environment failed."""
    samples = [
        Sample(7, i, [1], [0.0], "", "env", 0, turn_rewards=rewards or [], failure=None if rewards else "timeout")
        for i, rewards in enumerate(turns)
    ]
    for sample in samples:
        sample.turn_seconds = [0.5] * max(1, len(sample.turn_rewards))
    return SampleGroup(Prompt(7, "q", (1,), ""), samples)


def test_means_are_of_all_trajectories():
    ranks = [[group([1.0, 2.0], [0.5])], [group([0.0, 0.0, 3.0]), group(None)]]
    ranks[1][0].samples[0].finish_reason = "max_turns"
    assert values_of([turn_metrics(groups) for groups in ranks]) == {
        "env/failures": 1.0,
        "env/turns": 6 / 4,
        "env/reward": pytest.approx(6.5 / 4),
        "env/seconds": 0.5 * 7 / 4,
        "env/max_turns": 0.25,
        "env/cut": 0.0,
        "env/reward/turn_1": 0.5,
        "env/reward/turn_2": 1.0,
        "env/reward/turn_3": 3.0,
    }


def test_a_trajectory_that_was_cut_in_its_first_turn_counts():
    cut = SampleGroup(Prompt(1, "q", (1,), ""), [Sample(1, 0, [1], [0.0], "", "length", 0)])
    for groups, mean in (([cut], 0.0), ([cut, group([1.0])], 0.5), ([], 0.0)):
        assert values_of([turn_metrics(groups)]) | {"env/reward/turn_1": 0} == {
            "env/failures": 0, "env/turns": mean, "env/reward": mean, "env/seconds": 0.5 * mean, "env/reward/turn_1": 0,
            "env/max_turns": 0, "env/cut": 0,
        }  # fmt: skip


def test_the_share_of_waiting_is_of_all_ranks_rollouts():
    row = {"engine/generated_tokens": 30.0, "engine/parked_seconds": 2.0}
    ranks = [{"rollout": 3.0, "idle": 0.0}, {"rollout": 1.0, "idle": 2.5}]
    assert _rollout_rates(row, ranks) == {"engine/tokens_per_s": 10.0, "env/parked_share": 0.5}
    assert _rollout_rates({"engine/generated_tokens": 0.0}, [{"rollout": 0.1}]) == {}
    assert _rollout_rates(row, [{}]) == {}  # a clock that stands still
    two_rounds = [{"rollout": 3.0 + 1.0, "idle": 1.0}, {"rollout": 1.0 + 2.0, "idle": 2.0}]
    assert _rollout_rates({"engine/generated_tokens": 30.0}, two_rounds)["engine/tokens_per_s"] == 6.0


def test_the_turns_of_a_trajectory_are_texts_calls_rewards_and_seconds():
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>{</tool_call>1 2no'
    tokens = list(map(ord, text))
    end = text.index("1 2")
    sample = Sample(7, 0, tokens, [], "no", "abort", 0, given=((end, end + 3),))
    sample.turn_rewards, sample.turn_seconds = [0.5], [0.1, 3.0]
    first, second = turn_rows(sample, lambda ids: "".join(map(chr, ids)), has_tools=True)
    add, broken = first.pop("calls")
    assert add == {"name": "add", "arguments": {"a": 1}} and "is no JSON" in broken["problem"]
    assert first == {"response": text[:end], "observation": "1 2", "reward": 0.5, "seconds": 0.1}
    assert second == {"response": "no", "seconds": 3.0}
    assert "calls" not in turn_rows(sample, lambda ids: "".join(map(chr, ids)), has_tools=False)[0]


def test_a_turn_is_shown_up_to_its_stop_string_as_the_environment_saw_it():
    sample = Sample(7, 0, list(map(ord, "a<end>\n1b")), [], "b", "env", 0, given=((7, 8),))
    rows = turn_rows(sample, lambda ids: "".join(map(chr, ids)), ["d>\n", "<end>"], has_tools=False)
    assert rows == [{"response": "a<end>", "observation": "1"}, {"response": "b"}]


def test_failures_are_named():
    assert failure_warning([group([1.0])]) is None
    warning = failure_warning([group([1.0], None, None)])
    assert warning.startswith("2 of 3 trajectories") and warning.endswith("; one of them: prompt 7, sample 1: timeout")
