"""Virtual time. Torch-free."""

from __future__ import annotations


class VirtualClock:
    """A `Clock` that moves only when it is told to."""

    def __init__(self, start: float = 0.0):
        self._now = start

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        return self._now

    def advance(self, seconds: float) -> None:
        """`seconds` >= 0 pass. Mutates the clock."""
        assert seconds >= 0, "time never goes back"
        self._now += seconds

    def set(self, now: float) -> None:
        """It is `now`, which may not lie in the past. Mutates the clock."""
        self.advance(now - self._now)
