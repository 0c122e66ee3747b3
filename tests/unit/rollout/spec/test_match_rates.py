"""Match rates: what was counted shows, sparse cells lean on their neighbours, old counts fade."""

import json

import numpy as np
import pytest

from megatron_tlt.rollout.spec.match_rates import MatchRateTable

D, G = 8, 32


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


def test_starts_at_the_prior_in_the_form_that_drafters_take():
    prior = np.linspace(0.1, 0.9, G)
    rates = MatchRateTable(D, G, prior).rates
    assert rates.shape == (D, G) and rates.dtype == np.float32 and rates.flags.c_contiguous
    np.testing.assert_allclose(rates, np.broadcast_to(prior, (D, G)), rtol=1e-6)
    assert MatchRateTable(D, G).sibling_rates.shape == (3, G)


def test_learns_rates_by_depth_and_gap():
    table, rates = MatchRateTable(D, G, memory=1e9), truth()
    feed(table, rates, 200_000)
    assert np.abs(table.rates - rates).mean() < 0.02
    assert np.abs(table.rates[0].mean() - table.rates[7].mean()) > 0.08  # depths are told apart


def test_rates_rise_with_the_gap_and_siblings_rates_fall():
    table = MatchRateTable(D, G)
    feed(table, truth(), 640)
    rng = np.random.default_rng(1)
    for _ in range(40):
        bucket = rng.integers(0, G, 16).astype(np.int32)
        cells = rng.integers(0, 3, 16) * G + bucket
        table.observe_siblings(cells, rng.random(16) < 0.4 * np.exp(-bucket / 8))
    assert (np.diff(table.rates, axis=1) >= 0).all() and table.rates.min() > 0 and table.rates.max() < 1
    assert (np.diff(table.sibling_rates, axis=1) <= 0).all()
    assert table.sibling_rates[0, 0] > table.sibling_rates[0, 20] + 0.1


def test_an_unseen_depth_leans_on_the_others():
    table = MatchRateTable(D, G, np.full(G, 0.9), memory=1e9)
    feed(table, np.full((D, G), 0.3), 64_000, depths=1)
    np.testing.assert_allclose(table.rates[5], 0.3, atol=0.08)


def test_follows_a_changing_policy():
    table = MatchRateTable(D, G, memory=4096)
    feed(table, np.full((D, G), 0.9), 20_000)
    assert table.rates.mean() > 0.85
    feed(table, np.full((D, G), 0.2), 16_000, seed=1)
    assert table.rates.mean() < 0.3


def test_rates_change_at_once_at_first_and_only_every_nth_call_later():
    table = MatchRateTable(D, G, refresh_every=4)
    changes = []
    for _ in range(80):
        before, kept = table.rates, table.rates.copy()
        table.observe(np.array([0]), np.array([True]))
        changes.append(table.rates is not before)
        np.testing.assert_array_equal(before, kept)  # a drafter may still be reading it
    assert all(changes[:4]) and sum(changes[40:]) == 10


def test_state_survives_a_round_trip_through_json():
    table, other = MatchRateTable(D, G), MatchRateTable(D, G)
    feed(table, truth(), 3_000)
    table.observe_siblings(np.array([G + 2]), np.array([True]))
    other.load_state_dict(json.loads(json.dumps(table.state_dict())))
    np.testing.assert_array_equal(other.rates, table.rates)
    np.testing.assert_array_equal(other.sibling_rates, table.sibling_rates)
    feed(table, truth(), 3_000, seed=2)
    feed(other, truth(), 3_000, seed=2)
    np.testing.assert_array_equal(other.rates, table.rates)
    with pytest.raises(ValueError, match="shape"):
        MatchRateTable(D, G + 1).load_state_dict(table.state_dict())
