"""`wall_seconds`: the time of events and metrics, which does not follow jumps of the wall clock. Torch-free."""

from __future__ import annotations

import time

_OFFSET = time.time() - time.perf_counter()


def wall_seconds() -> float:
    """Seconds since 1970 by the wall clock at the start of this process, plus the monotonic time since then.

    It never goes back, so differences are durations, whatever sets the wall clock meanwhile.
    """
    return _OFFSET + time.perf_counter()
