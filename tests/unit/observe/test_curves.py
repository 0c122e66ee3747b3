"""The curve of running requests as an event: small, and true where it is looked at."""

from __future__ import annotations

import random

import pytest

from megatron_tlt.observe.curves import drafting_shares, thinned


def test_short_curves_stay_and_long_ones_keep_ends_and_tail():
    curve = [(0.001 * i, 2000 - i) for i in range(1990)] + [(2.0 + i, 10 - i) for i in range(11)]
    kept = thinned(curve, 40)
    assert len(kept) <= 40 and kept[0] == curve[0] and kept[-1] == curve[-1]
    assert [point for point in kept if point[0] >= 2.0] == curve[-11:], "the long tail is kept point by point"
    assert kept == sorted(kept) and set(kept) <= set(curve)
    assert thinned(curve[:40], 40) == curve[:40]


def naive_shares(switches, first, last, parts, grid=20000):
    """Looked up at many moments."""
    hits = [0] * parts
    for i in range(grid):
        at = first + (last - first) * (i + 0.5) / grid
        drafts = [value for moment, value in switches if moment <= at]
        hits[i * parts // grid] += bool(drafts and drafts[-1])
    return [n * parts / grid for n in hits]


@pytest.mark.parametrize("seed", range(5))
def test_shares_are_those_of_a_naive_count(seed):
    draw = random.Random(seed)
    moments = sorted(draw.uniform(-1.0, 11.0) for _ in range(13))
    switches = [(at, index % 2 == 0) for index, at in enumerate(moments)]
    assert drafting_shares(switches, 0.0, 10.0, 8) == pytest.approx(
        naive_shares(switches, 0.0, 10.0, 8), abs=0.02
    )
