"""`wall_seconds`: the time of events and metrics, which a jump of the wall clock does not reach. Torch-free."""

from __future__ import annotations

import time

_TRIES = 32


def _read_both() -> tuple[float, float]:
    """(`time`, `perf_counter`) of one moment: of the try in which least time went by, for any may be interrupted."""
    tries = []
    for _ in range(_TRIES):
        before = time.perf_counter()
        epoch = time.time()
        after = time.perf_counter()
        tries.append((after - before, epoch, (before + after) / 2))
    _, epoch, moment = min(tries)
    return epoch, moment


_EPOCH, _STARTED = _read_both()


def wall_seconds() -> float:
    """Seconds since 1970, as the clock said when this process started, and counted on from there.

    So it never goes back, and differences of two of them are durations: someone setting the clock, or a
    leap of NTP, changes nothing until the next start.
    """
    return _EPOCH + (time.perf_counter() - _STARTED)
