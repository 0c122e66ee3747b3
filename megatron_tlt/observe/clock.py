"""`wall_seconds`: the time of events and metrics, which does not follow jumps of the wall clock. Torch-free."""

from __future__ import annotations

import time

_TRIES = 32


def _read_both() -> tuple[float, float]:
    """(`time`, `perf_counter`) of one moment: of the quickest of several tries, since any may be interrupted."""
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
    """Seconds since 1970 by the wall clock at the start of this process, plus the monotonic time since then.

    It never goes back, so differences are durations, whatever sets the wall clock meanwhile.
    """
    return _EPOCH + (time.perf_counter() - _STARTED)
