"""Packing and balancing: valid, deterministic, near the best possible, and importable alone."""

from __future__ import annotations

import itertools
import random

import pytest

from megatron_tlt.data.packing import balance, pack_by_budget


@pytest.mark.parametrize("seed", range(20))
def test_packs_hold_every_item_once_and_keep_the_budget(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(0, 120) for _ in range(rng.randint(0, 200))]
    groups = pack_by_budget(lengths, 100)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        assert group == sorted(group)
        assert sum(lengths[i] for i in group) <= 100 or len([i for i in group if lengths[i]]) == 1


def test_packs_are_by_first_fit_decreasing() -> None:
    assert pack_by_budget([40, 60, 30, 70, 10, 90], 100) == [[4, 5], [2, 3], [0, 1]]


@pytest.mark.parametrize("seed", range(8))
def test_balance_is_within_the_bound_of_longest_processing_time(seed: int) -> None:
    rng = random.Random(seed)
    costs, bins = [rng.randint(1, 50) for _ in range(9)], rng.choice([2, 3])

    def fullest(places: tuple[int, ...] | list[int]) -> int:
        return max(sum(c for c, p in zip(costs, places) if p == b) for b in range(bins))

    best = min(fullest(places) for places in itertools.product(range(bins), repeat=len(costs)))
    assert best <= fullest(balance(costs, bins)) <= (4 / 3 - 1 / (3 * bins)) * best
