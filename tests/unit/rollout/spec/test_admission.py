"""Admission against brute force over all sets of nodes that are closed under ancestors."""

from itertools import product

import numpy as np
import pytest

from megatron_tlt.rollout.spec.admission import best_of_all, best_of_chain, best_of_each


def draft(rng, rows, most, tree):
    """Up to `most` random nodes a row: counts, cumulative acceptance, parents within the row (-1: root). With ties."""
    counts, cumulative_acceptance, parents = [], [], []
    for _ in range(rows):
        n = int(rng.integers(0, most + 1))
        values = []
        for node in range(n):
            parent = int(rng.integers(-1, node)) if tree and node else node - 1
            above = values[parent] if parent >= 0 else 1.0
            values.append(above * float(rng.choice([0.3, 0.5, 0.8, 1.0])))
            parents.append(parent)
        counts.append(n)
        cumulative_acceptance += values
    return (
        np.array(counts, np.int32),
        np.array(cumulative_acceptance, np.float32),
        np.array(parents, np.int32),
    )


def is_closed(keep, counts, parents):
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    above = np.where(parents < 0, True, keep[np.maximum(starts + parents, 0)])
    return bool((above | ~keep).all())


def closed_sets(counts, parents):
    for bits in product((False, True), repeat=len(parents)):
        keep = np.array(bits, bool)
        if is_closed(keep, counts, parents):
            yield keep


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("shape", ["linear", "stair", "flat"])
def test_no_closed_set_is_worth_more(tree, shape):
    rng = np.random.default_rng(7)
    for _ in range(25):
        counts, cumulative_acceptance, parents = draft(rng, 3, 3, tree)
        n = len(cumulative_acceptance)
        steps = {
            "linear": np.arange(n + 1),
            "stair": np.ceil(np.arange(n + 1) / 3) * 3,
            "flat": np.zeros(n + 1),
        }
        costs, rate = 2e-4 + 6e-5 * steps[shape], float(rng.uniform(1e3, 2e4))
        keep = best_of_all(cumulative_acceptance, costs, rate)
        assert is_closed(keep, counts, parents)
        worth = [
            float(s[k].sum()) - rate * costs[k.sum()]
            for s in [cumulative_acceptance]
            for k in closed_sets(counts, parents)
        ]
        assert cumulative_acceptance[keep].sum() - rate * costs[keep.sum()] == pytest.approx(
            max(worth), abs=1e-5
        )


def test_a_chain_alone_is_decided_alike():
    rng = np.random.default_rng(1)
    for _ in range(200):
        n = int(rng.integers(1, 9))
        cumulative_acceptance = np.cumprod(rng.uniform(0.4, 1.0, n)).astype(np.float32)
        costs = np.cumsum(rng.uniform(0, 1e-4, n + 1))
        rate = float(rng.uniform(1e3, 2e4))
        assert (
            best_of_chain(cumulative_acceptance.tolist(), costs.tolist(), rate)
            == best_of_all(cumulative_acceptance, costs, rate).sum()
        )


def test_repeated_with_the_rate_achieved_it_finds_the_best_ratio_of_totals():
    """Dinkelbach: tokens over seconds, both summed over many different steps."""
    rng = np.random.default_rng(2)
    steps = [np.sort(rng.uniform(0, 1, 6))[::-1].astype(np.float32) ** 2 for _ in range(40)]
    costs = 3e-4 + 8e-5 * np.arange(7)

    def total(rate):
        tokens = seconds = 0.0
        for cumulative_acceptance in steps:
            keep = best_of_all(cumulative_acceptance, costs, rate)
            tokens += 1 + float(cumulative_acceptance[keep].sum())
            seconds += costs[keep.sum()]
        return tokens / seconds

    rate = 1 / costs[0]
    for _ in range(6):
        rate = max(rate, total(rate))
    assert rate == pytest.approx(max(total(r) for r in np.linspace(500, 12_000, 300)), rel=1e-3)


def test_best_of_each_row_is_the_likeliest_closed_set_of_its_size():
    rng = np.random.default_rng(3)
    for _ in range(25):
        counts, cumulative_acceptance, parents = draft(rng, 3, 4, tree=True)
        keep = best_of_each(cumulative_acceptance, counts, 2)
        assert is_closed(keep, counts, parents)
        row_of = np.repeat(np.arange(3), counts)
        np.testing.assert_array_equal(np.bincount(row_of[keep], minlength=3), np.minimum(counts, 2))
        best = max(
            float(cumulative_acceptance[k].sum())
            for k in closed_sets(counts, parents)
            if (np.bincount(row_of[k], minlength=3) <= 2).all()
        )
        assert cumulative_acceptance[keep].sum() == pytest.approx(best)


def test_nothing_drafted():
    empty = np.zeros(0, np.float32)
    assert best_of_all(empty, np.ones(1), 1.0).shape == (0,)
    assert best_of_each(empty, np.zeros(4, np.int32), 3).shape == (0,)
