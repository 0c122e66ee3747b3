"""Pruning against brute force over all sets of nodes that are closed under ancestors."""

from itertools import product

import numpy as np
import pytest

from megatron_tlt.rollout.spec.draft import prune
from megatron_tlt.types import DraftStrategy


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
def test_no_closed_set_is_worth_more_less_the_price_of_its_rows(tree):
    rng = np.random.default_rng(7)
    for _ in range(40):
        counts, cumulative_acceptance, parents = draft(rng, 3, 3, tree)
        price = float(rng.uniform(0.05, 0.95))
        strategy = DraftStrategy("trained", 3, min_cumulative_acceptance=price)
        keep = prune(strategy, cumulative_acceptance, counts)
        assert is_closed(keep, counts, parents)
        best = max(float((cumulative_acceptance[k] - price).sum()) for k in closed_sets(counts, parents))
        assert (cumulative_acceptance[keep] - price).sum() == pytest.approx(best, abs=1e-5)


def test_of_each_request_the_likeliest_nodes_up_to_the_number_to_verify():
    rng = np.random.default_rng(3)
    for _ in range(25):
        counts, cumulative_acceptance, parents = draft(rng, 3, 4, tree=True)
        keep = prune(DraftStrategy("trained", 4, 2, num_verify_tokens=3), cumulative_acceptance, counts)
        assert is_closed(keep, counts, parents)
        row_of = np.repeat(np.arange(3), counts)
        np.testing.assert_array_equal(np.bincount(row_of[keep], minlength=3), np.minimum(counts, 2))
        best = max(
            float(cumulative_acceptance[k].sum())
            for k in closed_sets(counts, parents)
            if (np.bincount(row_of[k], minlength=3) <= 2).all()
        )
        assert cumulative_acceptance[keep].sum() == pytest.approx(best)
