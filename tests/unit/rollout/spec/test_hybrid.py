"""What the hybrid drafter knows of the price of an eagle call, and when it makes one."""

import numpy as np
import pytest

from megatron_tlt.rollout.spec.hybrid import CallSeconds, HybridDrafter


def test_calls_cost_what_they_did_by_rows():
    calls = CallSeconds()
    assert calls.of(4) == (0.0, 0.0)
    for _ in range(10):
        calls.observe(1, 4, 100e-6)
        calls.observe(16, 4, 400e-6)
    assert calls.of(1)[0] == pytest.approx(100e-6)
    assert calls.of(16)[0] == pytest.approx(400e-6)
    assert calls.of(1)[1] == pytest.approx(0.5 * 25e-6)
    assert calls.of(64)[0] == pytest.approx(1600e-6)  # nearest bucket, by rows


def test_neither_the_first_calls_nor_slow_ones_are_believed():
    calls = CallSeconds()
    calls.observe(1, 4, 5e-3)  # caught up with a long answer
    for _ in range(6):
        calls.observe(1, 4, 100e-6)
    calls.observe(1, 4, 20e-3)
    assert calls.of(1)[0] < 110e-6


def asks(rate, promise, expected, call):
    drafter = HybridDrafter(None, None, 8)
    drafter.rate = rate
    drafter._promise[:] = promise
    for _ in range(5):
        drafter._calls.observe(4, 4, call)
    return drafter._ask(np.arange(4, dtype=np.int32), np.full(4, 5, np.int32), np.array(expected))


def test_eagle_is_asked_only_for_rows_that_pay_for_the_call():
    """At 1000 tokens a second a call of 0.8 ms for four rows is worth 0.2 tokens a row."""
    assert asks(1000.0, 0.1, [0.0] * 4, 800e-6) is None
    assert asks(1000.0, 1.0, [0.0] * 4, 800e-6).tolist() == [True] * 4
    assert asks(1000.0, 1.0, [0.0, 0.95, 0.0, 2.0], 800e-6).tolist() == [True, False, True, False]
    assert asks(1000.0, 1.0, [0.0, 2.0, 2.0, 2.0], 8e-3) is None


def test_without_a_rate_it_must_promise_a_quarter_more():
    chosen = asks(0.0, 2.0, [0.0, 1.0, 1.5, 3.0], 0.0)
    assert chosen.tolist() == [True, True, False, False]


def test_eagle_is_tried_again_after_long_silence():
    drafter = HybridDrafter(None, None, 8)
    drafter.rate, drafter._promise[:] = 1000.0, 0.0
    ask = (np.arange(2, dtype=np.int32), np.full(2, 5, np.int32), np.zeros(2))
    asked = [drafter._ask(*ask) is not None for _ in range(300)]
    assert 1 <= sum(asked) <= 3
