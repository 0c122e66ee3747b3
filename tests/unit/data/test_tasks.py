"""Procedural tasks: random access, determinism, mixing, streams that stay apart, errors that help."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import reasoning_gym

from megatron_tlt.config.checks.learning import _BAD_VERIFIERS
from megatron_tlt.config.data import TaskConfig
from megatron_tlt.data.tasks import CHUNK, TaskSource, hash_problems
from megatron_tlt.errors import ConfigError

SUM = TaskConfig(name="chain_sum", weight=3.0, params={"max_terms": 3})
GCD = TaskConfig(name="gcd")
GLOBAL = [*(("list_functions", i) for i in range(40)), ("codeio", 18)]  # the latter of numpy


def test_an_item_is_a_function_of_seed_and_index() -> None:
    one, two = TaskSource([SUM, GCD], 7), TaskSource([SUM, GCD], 7)
    indices = [0, 3, CHUNK - 1, CHUNK, 12_345_678, 3]
    forward = [one.row(i) for i in indices]
    assert forward[1] == forward[-1]
    assert [two.row(i) for i in reversed(indices)] == forward[::-1]


def test_a_task_that_draws_from_global_generators_is_a_function_of_seed_and_index_too(tmp_path, monkeypatch) -> None:
    """Of Python and numpy: `codeio` runs programs that do; other users of the two find them as they were."""
    monkeypatch.chdir(tmp_path)  # one of these programs writes files
    drawn = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        state, of_numpy = random.getstate(), np.random.get_state()[1].tolist()
        drawn.append([TaskSource([TaskConfig(name=name)], 5).row(i) for name, i in GLOBAL])
        assert random.getstate() == state and np.random.get_state()[1].tolist() == of_numpy
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(("seed", "refused"), [(None, ["word_ladder"]), ("random", ["word_ladder"]), ("0", [])])
def test_tasks_that_follow_hashes_need_equal_ones(seed, refused, monkeypatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    problems = hash_problems([SUM, TaskConfig(name="word_ladder")], "data.train.tasks")
    assert [problem.value for problem in problems] == refused
    assert all(problem.path == "data.train.tasks.1.name" for problem in problems)


@pytest.mark.nightly  # its imports take seconds
def test_items_are_the_same_in_another_process() -> None:
    code = (
        "from megatron_tlt.config.data import TaskConfig; from megatron_tlt.data.tasks import TaskSource; "
        "print(TaskSource([TaskConfig(name='chain_sum'), TaskConfig(name='gcd')], 5).row(901).prompt)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    here = TaskSource([TaskConfig(name="chain_sum"), TaskConfig(name="gcd")], 5).row(901).prompt
    assert done.stdout.rstrip("\n") == here.rstrip("\n")


def test_tasks_are_mixed_by_weight() -> None:
    stream = TaskSource([SUM, GCD], 0)
    counts = Counter(stream.row(i).task for i in range(1200))
    assert 0.70 < counts["chain_sum"] / 1200 < 0.80


def test_streams_of_near_seeds_share_nothing() -> None:
    """reasoning-gym itself draws item i from seed + i, so its datasets 0 and 1 share all but one item."""
    wide = TaskConfig(name="chain_sum", params={"min_terms": 6, "min_digits": 4, "max_terms": 6})
    zero, one = TaskSource([wide], 0), TaskSource([wide], 1)
    prompts = {zero.row(i).prompt for i in range(2 * CHUNK)}
    assert len(prompts) == 2 * CHUNK, "nor do chunks"
    assert not prompts & {one.row(i).prompt for i in range(300)}


def test_metadata_carries_what_the_verifier_needs() -> None:
    item = TaskSource([SUM], 0).row(0)
    assert item.metadata["task_name"] == "chain_sum"
    assert item.metadata["task_params"] == {"max_terms": 3}
    assert item.metadata["task_entry"]["answer"] == item.answer


def test_bad_tasks_are_refused_all_at_once_with_the_nearest_name() -> None:
    bad = [
        TaskConfig(name="chain_sums"),
        TaskConfig(name="chain_sum", params={"max_term": 3}),
        TaskConfig(name="chain_sum", params={"seed": 3}),
        GCD,
    ]
    with pytest.raises(ConfigError) as error:
        TaskSource(bad, 0, "data.eval.tasks")
    first, second, third = error.value.problems
    assert (first.path, first.value) == ("data.eval.tasks.0.name", "chain_sums")
    assert "chain_sum" in first.allowed
    assert second.path == "data.eval.tasks.1.params.max_term"
    assert "max_terms" in second.allowed
    assert "source's own seed" in third.allowed


def test_a_value_the_generator_refuses_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"data\.train\.tasks\.0\.params.*chain_sum refuses"):
        TaskSource([TaskConfig(name="chain_sum", params={"min_terms": 9, "max_terms": 2})], 0)
    with pytest.raises(ConfigError, match="at least one task"):
        TaskSource([], 0)
    with pytest.raises(ConfigError, match=r"maze refuses: .*Could not generate"):  # not one item
        TaskSource([TaskConfig(name="maze", params={"min_dist": 90, "max_dist": 95})], seed=0)


@pytest.mark.parametrize(
    ("name", "answer"),
    [("coin_flip", "0"), ("complex_arithmetic", "nan"), ("game_of_life_halting", "no"), ("puzzle24", "6*4*1*1")],
)
def test_a_verifier_that_is_refused_accepts_one_answer_in_every_prompt(name: str, answer: str) -> None:
    """Where this fails, reasoning-gym has mended it: `config/checks/learning` may take the task again."""
    assert name in _BAD_VERIFIERS
    items = reasoning_gym.create_dataset(name, seed=5, size=6)
    assert {items.score_answer(answer, items[i]) for i in range(6)} == {1.0}
