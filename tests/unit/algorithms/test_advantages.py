"""Advantages, shaping, group filters and divisors on cases small enough to check by hand."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from megatron_tlt.algorithms import advantages as adv
from megatron_tlt.algorithms.base import RewardTable
from megatron_tlt.algorithms.build import ALGORITHMS, build_algorithm
from megatron_tlt.config.algorithm import AlgorithmSection
from megatron_tlt.types import Prompt, RewardResult, Sample, SampleGroup, TrainSequence, Trajectory
from tests.helpers.mpi import ROOT
from tests.helpers.thread_ranks import ThreadRank, on_ranks

PROMPT = np.array([1, 1, 1, 5, 5, 9])
REWARD = np.array([1.0, 0.0, 0.5, 2.0, 2.0, 7.0])


def test_the_page_of_algorithms_has_each_default_clip():
    page = (ROOT / "docs/guides/algorithms.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([\d.e-]+), ([\d.e-]+) \|", page, re.MULTILINE)
    found = {name: (float(low), float(high)) for name, low, high in rows}
    assert found == {name: algorithm.default_clip for name, algorithm in ALGORITHMS.items()}


def table(**changes: np.ndarray) -> RewardTable:
    columns = {
        "prompt_id": PROMPT,
        "sample_index": np.array([0, 1, 2, 0, 1, 0]),
        "reward": REWARD,
        "length": np.array([4, 2, 6, 1, 3, 0]),
        "truncated": np.array([False, False, True, False, False, False]),
        "aborted": np.zeros(6, np.bool_),
        "kl_sum": np.zeros(6),
    }
    return RewardTable(**{**columns, **changes})


def sequences_of(rewards: RewardTable, rows: list[int]) -> list[TrainSequence]:
    made = []
    for row in rows:
        logprobs, ids = np.zeros(rewards.length[row], np.float32), np.zeros(rewards.length[row] + 1, np.int32)
        key = int(rewards.prompt_id[row]), int(rewards.sample_index[row])
        made.append(TrainSequence.of(Trajectory(*key, ids, logprobs)))
    return made


def group_of(lengths: list[int], values: list[float]) -> SampleGroup:
    samples = [Sample(0, i, [1] * n, [0.0] * n, "", "stop", 0) for i, n in enumerate(lengths)]
    return SampleGroup(Prompt(0, "d", (1,), ""), samples, [RewardResult(v, v > 0) for v in values])


def test_a_response_alone_has_no_baseline_and_an_empty_batch_no_equal_groups() -> None:
    assert adv.leave_one_out(PROMPT, REWARD)[-1] == adv.standardised(PROMPT, REWARD, 0.5)[-1] == 0.0
    assert adv.share_of_equal_groups(PROMPT[:0], REWARD[:0]) == 0.0


@pytest.mark.parametrize(("kl_in", "expected"), [("reward", 8 / 16), ("loss", None)])
def test_a_kl_that_is_not_in_the_reward_is_no_column(kl_in: str, expected: float | None) -> None:
    algorithm = build_algorithm(AlgorithmSection(name="rloo", kl_coef=0.1, kl_in=kl_in), 10)
    rewards = table(kl_sum=np.array([4.0, 0, 4, 0, 0, 0]))
    assert algorithm.table_metrics(rewards).get("reward/kl") == expected


def test_assign_depends_on_the_table_not_on_the_local_share() -> None:
    for name in ALGORITHMS:
        algorithm = build_algorithm(AlgorithmSection(name=name), 10)
        whole = sequences_of(table(), [0, 1, 2, 3, 4])
        algorithm.assign(whole, table(), None, lambda x: x)
        for row in range(5):
            alone = sequences_of(table(), [row])
            algorithm.assign(alone, table(), None, lambda x: x)
            np.testing.assert_array_equal(alone[0].advantages, whole[row].advantages)


def test_masks_multiply() -> None:
    """Row 2 is truncated, row 0 has tokens that were given, another mask leaves out one of row 1."""
    algorithm = build_algorithm(AlgorithmSection(mask_truncated=True), 10)
    rows = sequences_of(table(length=np.array([2, 2, 6, 1, 3, 0])), [2])
    ids, logprobs = np.zeros(5, np.int32), np.zeros(4, np.float32)
    rows.append(TrainSequence.of(Trajectory(int(PROMPT[0]), int(table().sample_index[0]), ids, logprobs, ((1, 3),))))
    rows += sequences_of(table(), [1])
    rows[2].loss_mask[0] = 0.0
    algorithm.assign(rows, table(length=np.array([2, 2, 6, 1, 3, 0])), None, lambda x: x)
    assert [s.loss_mask.tolist() for s in rows] == [[0] * 6, [1, 0, 0, 1], [0, 1]]
    assert [s.weight for s in rows] == [1 / 6, 1 / 2, 1 / 2], "of drawn tokens"


def test_assign_reports_the_step() -> None:
    algorithm = build_algorithm(AlgorithmSection(mask_truncated=True), 10)
    metrics = algorithm.assign([], table(), None, lambda x: x)
    assert metrics["reward/equal_groups"] == pytest.approx(2 / 3)
    assert metrics["loss/masked_samples"] == pytest.approx(2 / 6)


def test_reinforce_pp_with_kl_in_the_reward_whitens_over_ranks() -> None:
    config = AlgorithmSection(name="reinforce_pp", kl_coef=0.5, kl_in="reward")
    rng = np.random.default_rng(0)
    rows, shares = [0, 1, 2, 3, 4], [[0, 3], [1, 2, 4], []]  # the third rank has nothing
    kl = {row: rng.normal(size=table().length[row]) for row in rows}
    later = {row: np.array([kl[row][t:].sum() for t in range(len(kl[row]))]) for row in rows}
    returns = {row: REWARD[row] - 0.5 * later[row] for row in rows}
    flat = np.concatenate([returns[row] for row in rows])

    results: dict[int, np.ndarray] = {}

    def work(rank: ThreadRank) -> None:
        mine = shares[rank.rank]
        sequences, algorithm = sequences_of(table(), mine), build_algorithm(config, 10)

        def reduce_sum(values: np.ndarray) -> np.ndarray:
            total = torch.from_numpy(values.copy())
            rank.all_reduce(total)
            return total.numpy()

        algorithm.assign(sequences, table(), [kl[row] for row in mine], reduce_sum)
        results.update({row: s.advantages for row, s in zip(mine, sequences, strict=True)})

    on_ranks(3, work)
    for row in rows:
        expected = (returns[row] - flat.mean()) / (flat.std() + config.advantage_eps)
        np.testing.assert_allclose(results[row], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("length", "penalty"), [(0, 0), (6, 0), (7, 0.25), (8, 0.5), (10, 1), (12, 1)])
def test_overlong_shaping_is_equation_13(length: int, penalty: float) -> None:
    algorithm = build_algorithm(AlgorithmSection(name="dapo", overlong_buffer=4), 10)
    assert algorithm.shaped(group_of([length], [1.0])) == [1.0 - penalty]


def test_dynamic_sampling_drops_groups_of_equal_rewards() -> None:
    plain = build_algorithm(AlgorithmSection(name="dapo"), 10)
    dynamic = build_algorithm(AlgorithmSection(name="dapo", dynamic_sampling=True), 10)
    assert plain.keep_group(group_of([3, 3], [1.0, 1.0]))
    assert not dynamic.keep_group(group_of([3, 3], [1.0, 1.0]))
    group = group_of([3, 3, 3], [1.0, 0.0, 0.0])
    assert dynamic.keep_group(group)
    group.samples[0].finish_reason = "abort"
    assert not dynamic.keep_group(group)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_overlong_shaping_mixes_no_group(value: float) -> None:
    """DAPO, equation 11: all right (or all wrong) with an overlong response is all right."""
    dynamic = build_algorithm(AlgorithmSection(name="dapo", dynamic_sampling=True, overlong_buffer=4), 10)
    group = group_of([3, 9], [value, value])
    assert len(set(dynamic.shaped(group))) == 2 and not dynamic.keep_group(group)
    assert dynamic.keep_group(group_of([3, 10], [0.0, 1.0])), "shaped to one reward, and mixed all the same"
