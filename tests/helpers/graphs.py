"""A capturer of given sizes."""

from __future__ import annotations

from megatron_tlt.rollout.graph_capture import Captured


class Fake:
    """A capturer with given sizes: each step's temporary memory and each graph's own."""

    def __init__(self, temporary: dict[str, int] | int = 0, own: int = 0, unforeseen: int = 0):
        self.pool_bytes = 0
        self.temporary, self.own, self.unforeseen = temporary, own, unforeseen
        self.warmed = self.captured = 0
        self._needed = 0

    def warm_up(self, step) -> int:
        self.warmed += 1
        step()
        self._needed = self.temporary if isinstance(self.temporary, int) else self.temporary[step.__name__]
        return self._needed

    def capture(self, step):
        self.captured += 1
        self.pool_bytes = max(self.pool_bytes, self._needed + self.unforeseen)
        return Captured(step, self.own)
