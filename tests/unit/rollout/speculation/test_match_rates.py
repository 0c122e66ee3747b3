"""Match rates: what was counted shows, sparse cells lean on their neighbours, old counts fade."""

import numpy as np
import pytest

from megatron_tlt.rollout.speculation.match_rates import MatchRates

D, G = 8, 32


def table_of(prior: float = 0.5, memory: float = 4096.0) -> MatchRates:
    return MatchRates(np.full((D, G), prior), 16.0, memory, is_ordered=True)


def feed(table, rates, n, seed=0, depths=D):
    """n nodes of random depth and gap that match with `rates[depth, gap]`."""
    rng = np.random.default_rng(seed)
    for _ in range(n // 32):
        depth = rng.integers(0, depths, 32).astype(np.int32)
        bucket = rng.integers(0, G, 32).astype(np.int32)
        table.observe(depth * G + bucket, rng.random(32) < rates[depth, bucket])


def truth(low=0.2, high=0.95):
    by_gap = np.linspace(low, high, G)
    return np.clip(by_gap - 0.02 * np.arange(D)[:, None], 0, 1)


def test_starts_at_the_prior_in_the_form_that_c_takes():
    prior = np.random.default_rng(0).random(G) * 0.9 + 0.05  # of columns without order
    rates = MatchRates(prior, 12.0, 1e9).rates
    assert rates.shape == (G,) and rates.dtype == np.float32 and rates.flags.c_contiguous
    np.testing.assert_allclose(rates, prior, rtol=1e-6)


def test_learns_rates_by_depth_and_gap():
    table, rates = table_of(memory=1e9), truth()
    feed(table, rates, 200_000)
    assert np.abs(table.rates - rates).mean() < 0.02
    assert np.abs(table.rates[0].mean() - table.rates[7].mean()) > 0.08  # depths are told apart


@pytest.mark.parametrize("is_ordered", [True, False])
def test_rates_are_ordered_along_the_columns_where_that_is_known(is_ordered):
    table = MatchRates(np.full((3, G), 0.5), 16.0, 1e9, is_ordered=is_ordered)
    feed(table, np.tile(np.linspace(0.1, 0.9, G), (3, 1)), 6400, depths=3)
    steps = np.diff(table.rates, axis=1)
    assert bool((steps >= 0).all()) == is_ordered


def test_an_unseen_depth_leans_on_the_others():
    table = table_of(0.9, memory=1e9)
    feed(table, np.full((D, G), 0.3), 64_000, depths=1)
    np.testing.assert_allclose(table.rates[5], 0.3, atol=0.08)


def test_follows_a_changing_policy():
    table = table_of()
    feed(table, np.full((D, G), 0.9), 20_000)
    assert table.rates.mean() > 0.85
    feed(table, np.full((D, G), 0.2), 16_000, seed=1)
    assert table.rates.mean() < 0.3


def test_counts_of_a_former_drafter_weigh_little():
    table = table_of()
    feed(table, np.full((D, G), 0.1), 20_000)
    table.fade()
    assert table.rates.mean() < 0.25  # nothing else is known yet
    feed(table, np.full((D, G), 0.9), 320, seed=1)
    assert table.rates.mean() > 0.7


def test_rates_change_at_once_at_first_and_only_every_nth_call_later_in_the_same_memory():
    table = table_of()
    changes, rates = [], table.rates
    for _ in range(160):
        kept = rates.copy()
        table.observe(np.array([0]), np.array([True]))
        changes.append(bool((rates != kept).any()))
    assert table.rates is rates and all(changes[:4]) and sum(changes[128:]) == 2
