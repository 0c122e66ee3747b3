"""Step costs: right where measured, sensible where not, unmoved by outliers."""

import json

import numpy as np
import pytest

from megatron_tlt.rollout.spec.costs import DraftCosts, StepCosts
from tests.helpers.spec_world import gpu_seconds

# The demo policy, fp32, one thread: microseconds of B requests and T rows.
DEMO = {
    (1, 1): 221, (1, 2): 277, (1, 4): 405, (1, 6): 571, (1, 8): 779,
    (8, 8): 895, (8, 16): 1596, (8, 32): 3124, (64, 64): 7775, (64, 128): 13114,
}  # fmt: skip


def measured(points, times, seed=0, noise=0.05, outliers=0.05, scale=1.0, costs=None):
    """StepCosts after `times` rounds over `points` {(B, T): microseconds}."""
    rng = np.random.default_rng(seed)
    costs = costs or StepCosts()
    for _ in range(times):
        for (B, T), micros in points.items():
            slow = rng.uniform(2, 8) if rng.random() < outliers else 1.0
            costs.observe(B, T, scale * micros * 1e-6 * rng.lognormal(0, noise) * slow)
    return costs


def test_right_within_two_percent_where_measured_in_spite_of_outliers():
    costs = measured(DEMO, 40)
    for (B, T), micros in DEMO.items():
        assert costs.seconds(B, T) == pytest.approx(micros * 1e-6, rel=0.02), (B, T)


def test_a_few_measurements_tell_of_batches_never_seen():
    """Three plain batches and one with drafts: everything between comes out within a quarter."""
    known = {key: DEMO[key] for key in ((1, 1), (8, 8), (64, 64), (8, 32))}
    costs = measured(known, 5, outliers=0)
    for (B, T), micros in DEMO.items():
        assert costs.seconds(B, T) == pytest.approx(micros * 1e-6, rel=0.25), (B, T)
    assert costs.seconds(24, 24) == pytest.approx(24 / 32 * costs.seconds(32, 32), rel=0.1)


def test_never_falls_with_rows_or_requests():
    rng = np.random.default_rng(3)
    costs = StepCosts()
    for _ in range(600):
        B = int(rng.integers(1, 65))
        T = B + int(rng.integers(0, 4 * B))
        costs.observe(B, T, (100 + 30 * B + 80 * T) * 1e-6 * rng.lognormal(0, 0.2))
    rows = np.arange(64, 400)
    curves = np.stack([costs.curve(B, rows) for B in range(1, 65)])
    assert (np.diff(curves, axis=1) >= -1e-12).all()
    assert (np.diff(curves, axis=0) >= -1e-12).all()


def test_finds_the_ridge_of_a_gpu():
    points = {
        (B, T): 1e6 * float(gpu_seconds(B, T))
        for B in (1, 16, 64)
        for T in (B, 2 * B, 4 * B, 8 * B)
        if T >= B
    }
    costs = measured(points, 20)
    assert costs.seconds(16, 128) < 1.06 * costs.seconds(16, 16)
    for T in (64, 256, 512):
        assert costs.seconds(64, T) == pytest.approx(float(gpu_seconds(64, T)), rel=0.03)


def test_one_absurd_first_measurement_is_forgotten():
    costs = measured(DEMO, 5, outliers=0)
    costs.observe(8, 24, 1.0)
    assert costs.seconds(8, 24) < costs.seconds(8, 32) * 1.2
    for _ in range(6):
        costs.observe(8, 24, 2300e-6)
    assert costs.seconds(8, 24) == pytest.approx(2300e-6, rel=0.1)


def test_a_slower_machine_shows_in_cells_not_visited_since():
    costs = measured(DEMO, 40)
    visited = {key: DEMO[key] for key in ((1, 1), (1, 4), (8, 8))}
    measured(visited, 60, seed=1, scale=1.5, costs=costs)
    assert costs.seconds(1, 4) == pytest.approx(1.5 * 405e-6, rel=0.1)
    assert costs.seconds(8, 32) > 1.2 * 3124e-6


def test_forgets():
    costs = measured({(4, 8): 1000}, 100)
    measured({(4, 8): 2000}, 1500, costs=costs)
    assert costs.seconds(4, 8) == pytest.approx(2000e-6, rel=0.05)


def test_beyond_the_grid_it_goes_on_rising():
    costs = measured({(64, 64): 7775, (64, 4096): 330_000}, 10)
    assert costs.seconds(64, 8192) > 1.5 * costs.seconds(64, 4096)
    assert costs.seconds(2000, 4096) >= costs.seconds(1000, 4096)


def test_state_survives_a_round_trip_through_json():
    costs, other = measured(DEMO, 7), StepCosts()
    costs.observe(2, 5, 600e-6)
    other.load_state_dict(json.loads(json.dumps(costs.state_dict())))
    rows = np.arange(8, 80)
    measured(DEMO, 30, seed=4, costs=costs)
    measured(DEMO, 30, seed=4, costs=other)
    np.testing.assert_allclose(other.curve(8, rows), costs.curve(8, rows), rtol=0.02)
    assert not StepCosts().is_known
    StepCosts().load_state_dict(StepCosts().state_dict())


def test_draft_costs_are_a_call_and_its_tokens():
    rng = np.random.default_rng(0)
    costs = DraftCosts("eagle")
    assert not costs.is_known
    for _ in range(400):
        B = int(rng.choice([1, 4, 16]))
        tokens = B * int(rng.integers(1, 8))
        costs.observe(B, tokens, (30 + 10 * B + 14 * tokens) * 1e-6 * rng.lognormal(0, 0.05))
    call, token = costs.line(4, 16)
    assert token == pytest.approx(14e-6, rel=0.15) and call == pytest.approx(70e-6, rel=0.25)
    assert costs.seconds(1, 4) == pytest.approx(96e-6, rel=0.1)
    other = DraftCosts("eagle")
    other.load_state_dict(json.loads(json.dumps(costs.state_dict())))
    assert other.seconds(16, 32) == pytest.approx(costs.seconds(16, 32), rel=0.02)
    with pytest.raises(ValueError, match="suffix"):
        other.load_state_dict(DraftCosts("suffix").state_dict())
