from __future__ import annotations

import pytest

from megatron_tlt.drafter.outlook import HeldOutPoint, doubled_gain, outlook


def points(*pairs: tuple[float, float]) -> list[HeldOutPoint]:
    return [HeldOutPoint(100 * i, seconds, accepted) for i, (seconds, accepted) in enumerate(pairs, 1)]


def test_the_outlook_has_the_measurements_the_slope_and_the_gap():
    text = outlook(points((30, 1.0), (60, 1.5), (120, 2.0)), 3.25, 0.8, 0.7)
    assert [line.split() for line in text.splitlines()[2:5]] == [
        ["100", "30.0", "1.00"],
        ["200", "60.0", "1.50"],
        ["300", "120.0", "2.00"],
    ]
    assert "more time: +0.50 a minute in the last interval; +0.50 if num_steps is doubled" in text
    assert "trained on 0.800, held out 0.700" in text and "3.2 epochs" in text


@pytest.mark.parametrize(
    ("pairs", "says"),
    [
        ([(30, 1.0)], "more time: no estimate from one measurement"),
        ([(30, 2.0), (90, 1.5)], "more time: -0.50 a minute in the last interval\n"),
    ],
)
def test_few_measurements_promise_nothing(pairs, says):
    assert says in outlook(points(*pairs), 1.0, 0.5, 0.5)
    assert doubled_gain(points(*pairs)) is None
