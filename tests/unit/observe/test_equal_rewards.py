"""Rewards that are equal for all responses to a prompt are named, once."""

from __future__ import annotations

import pytest

from megatron_tlt.observe.equal_rewards import EqualRewards, equal_rewards_warning

EQUAL = {"reward/equal_groups": 1.0, "update/skipped_share": 1.0}
SAMPLE = {"prompt": "1 + 1?\n", "answer": "2", "response": "a" * 100 + "b" * 100, "reward": 0.0}


def test_the_warning_comes_once_and_again_after_a_step_with_a_gradient() -> None:
    monitor, other = EqualRewards("grpo"), EQUAL | {"reward/equal_groups": 0.9}
    rows = [EQUAL, EQUAL, EQUAL, EQUAL, other, EQUAL, EQUAL, EQUAL]
    said = [monitor.check(row, lambda: [SAMPLE]) for row in rows]
    assert [text is not None for text in said] == [False, False, True, False, False, False, False, True]
    quoted = f"prompt '1 + 1?\\n', answer '2', response '{'a' * 80} ... {'b' * 80}', reward 0.0."
    assert said[2] is not None and "in the last 3 steps" in said[2] and quoted in said[2]


@pytest.mark.parametrize(("truncated", "is_named"), [(0.9, True), (0.1, False)])
def test_many_truncated_responses_are_named_beside_equal_rewards(truncated: float, is_named: bool) -> None:
    said = equal_rewards_warning([EQUAL, EQUAL, EQUAL | {"length/truncated": truncated}], "grpo", [])
    assert said is not None and ("90% of the responses were truncated (rollout.max_tokens" in said) == is_named


def test_a_kl_in_the_reward_is_what_groups_of_equal_rewards_learn():
    said = [equal_rewards_warning([row] * 3, "grpo", []) for row in (EQUAL, EQUAL | {"reward/kl": 0.1})]
    assert ["no reward taught anything" in text for text in said] == [True, True]
    assert ["of the KL in the reward alone" in text for text in said] == [False, True]


@pytest.mark.parametrize(
    ("algorithm", "row", "is_warned"),
    [
        ("dapo", {"reward/equal_groups": 1.0, "update/skipped_share": 0.0}, True),
        ("grpo", {"policy/empty_step": 1.0}, False),
        ("reinforce_pp", EQUAL, True),
        ("reinforce_pp", {"reward/equal_groups": 1.0, "update/skipped_share": 0.0}, False),
        ("distill", EQUAL, False),
    ],
)
def test_only_rewards_that_an_algorithm_learns_nothing_from_are_named(algorithm, row, is_warned) -> None:
    """A KL in the loss has a gradient all the same; without a response there is nothing to quote."""
    assert (equal_rewards_warning([row] * 3, algorithm, []) is not None) == is_warned
