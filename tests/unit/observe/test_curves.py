"""The curve of running requests as an event: small, and true where it is looked at."""

from __future__ import annotations

import pytest

from megatron_tlt.observe.curves import parked_spans, thinned
from megatron_tlt.types import EngineStats


def test_short_curves_stay_and_long_ones_keep_ends_and_tail():
    curve = [(0.001 * i, 2000 - i) for i in range(1990)] + [(2.0 + i, 10 - i) for i in range(11)]
    kept = thinned(curve, 40)
    assert len(kept) <= 40 and kept[0] == curve[0] and kept[-1] == curve[-1]
    assert [point for point in kept if point[0] >= 2.0] == curve[-11:], "the long tail is kept point by point"
    assert kept == sorted(kept) and set(kept) <= set(curve)
    assert thinned(curve[:40], 40) == curve[:40]


def test_the_longest_waits_are_kept_in_order_and_polls_of_one_wait_are_one():
    stats = EngineStats()
    for number in range(100):
        stats.add_parked(10.0 * number, 10.0 * number + 1)
        stats.add_parked(10.0 * number + 1.001, 10.0 * number + 2 + 0.01 * number)
    found = list(parked_spans(stats))
    assert [seconds for _, seconds in found] == pytest.approx([2 + 0.01 * number for number in range(40, 100)])
    assert found[1][0] - found[0][0] == pytest.approx(10.0, abs=0.1)
    assert stats.parked_seconds == pytest.approx(sum(2 + 0.01 * number for number in range(100)) - 0.1)
