import pytest

from megatron_tlt.sim.clock import VirtualClock


def test_time_moves_when_told_and_never_back():
    clock = VirtualClock()
    clock.advance(2.5)
    clock.set(3.0)
    assert clock.now() == 3.0
    with pytest.raises(AssertionError):
        clock.set(2.0)
