import itertools
import math

import numpy as np
import pytest

from megatron_tlt.trainer.evaluation import pass_at_k, summarise
from megatron_tlt.trainer.turn_metrics import turn_columns
from megatron_tlt.types import Sample


@pytest.mark.parametrize(("correct", "total", "k"), [(0, 4, 2), (1, 4, 1), (1, 4, 2), (3, 6, 4), (6, 6, 3)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_response(correct, total, k):
    responses = [True] * correct + [False] * (total - correct)
    subsets = list(itertools.combinations(responses, k))
    assert pass_at_k(correct, total, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def columns(right_by_prompt):
    rows = [(p, c) for p, responses in enumerate(right_by_prompt) for c in responses]
    prompt, correct = map(np.array, zip(*rows, strict=True))
    length = np.arange(1, len(rows) + 1, dtype=float)
    cut = np.zeros(len(rows))
    return {
        "prompt": prompt,
        "correct": correct,
        "reward": correct.astype(float),
        "length": length,
        "cut": cut,
    }


def test_summary_means_errors_and_powers_of_two():
    result = summarise(5, columns([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]))
    share = np.array([0.25, 1.0, 0.0])
    assert result.pass_at["1"] == pytest.approx(share.mean())
    assert result.stderr == pytest.approx(share.std(ddof=1) / math.sqrt(3))
    assert set(result.pass_at) == {"1", "2", "4"}
    assert result.pass_at["4"] == pytest.approx(2 / 3)


def test_the_order_in_which_ranks_deliver_changes_no_bit():
    rows = columns(np.random.default_rng(0).integers(0, 2, (50, 4)).tolist())
    rows["reward"] = np.random.default_rng(1).random(200)
    split = np.concatenate([np.flatnonzero(rows["prompt"] % 3 == rank) for rank in range(3)])
    assert summarise(1, {name: values[split] for name, values in rows.items()}) == summarise(1, rows)


def test_turns_and_their_rewards_are_means_over_the_trajectories_that_had_them():
    rewards = [[1.0], [0.0, 1.0], [0.0, 0.5], []]
    samples = [Sample(0, i, [1], [0.0], "", "env", 0, turn_rewards=of_turn) for i, of_turn in enumerate(rewards)]
    found = summarise(1, columns([[1, 1], [0, 0]]) | turn_columns(samples))
    assert found.env == {"turns": 1.25, "reward/turn_1": pytest.approx(1 / 3), "reward/turn_2": 0.75}
    assert found.metrics()["eval/env/reward/turn_2"] == 0.75
