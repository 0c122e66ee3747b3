"""The fit of step costs."""

import numpy as np
import pytest

from megatron_tlt.rollout.speculation.step_costs import AcceptanceCounts, least_squares


def test_least_squares_finds_the_costs_and_never_a_negative_one():
    terms = [(1.0, b, b * (1 + length)) for b in (1.0, 4.0, 16.0) for length in (0.0, 2.0, 8.0)]
    exact = least_squares([(t, 3e-4 * t[0] + 2e-5 * t[1] + 7e-5 * t[2], 1.0) for t in terms], 3)
    np.testing.assert_allclose(exact, (3e-4, 2e-5, 7e-5), rtol=0.15)
    falling = least_squares([(t, 1e-3 - 1e-5 * t[1] + 1e-5 * t[2], 1.0) for t in terms], 3)
    assert min(falling) >= 0
    flat = least_squares([(t, 1e-3, 1.0) for t in terms], 3)
    assert flat[0] == pytest.approx(1e-3, rel=0.2) and 100 * flat[2] < 5e-4


def test_positions_that_a_step_had_no_room_for_keep_their_rates():
    counts = AcceptanceCounts([0.0] * 4, [0.0] * 4)
    for _ in range(200):
        counts.add(4, 8, [7, 6, 5, 4])
    before = counts.rates()
    for _ in range(200):
        counts.add(2, 256, [224, 192])
    assert counts.rates() == pytest.approx(before, rel=0.02)
