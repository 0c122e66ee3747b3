"""`wall_seconds`: the time of events and metrics, which a jump of the wall clock does not reach. Torch-free."""

from __future__ import annotations

import time

_EPOCH, _STARTED = time.time(), time.perf_counter()


def wall_seconds() -> float:
    """Seconds since 1970, as the clock said when this process started, and counted on from there.

    So it never goes back, and differences of two of them are durations: someone setting the clock, or a
    leap of NTP, changes nothing until the next start.
    """
    return _EPOCH + (time.perf_counter() - _STARTED)
