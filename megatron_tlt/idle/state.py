"""The states of a rank, the transitions between them, and how long each lasted. Torch-free, MPI-free.

    BUSY ----> IDLE <----> PRE_ROLLING, TRAINING
      ^          |            |
      +----------+------------+

BUSY: the replica has live requests, or can fetch some. IDLE: it has none, and others do. PRE_ROLLING: idle, and
decoding the next two steps' prompts. TRAINING: idle, and training the drafter. A window ends with BUSY (the step goes
on). IDLE follows TRAINING where training stops before the window ends: enough micro-steps, no data, or a failure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum


class RankState(IntEnum):
    """The state of a rank during the rollout phase."""

    BUSY = 0
    IDLE = 1
    TRAINING = 2
    PRE_ROLLING = 3


@dataclass(frozen=True, slots=True)
class StateSpan:
    """One stay in a state, in seconds of the clock that measured it."""

    state: RankState
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.end - self.start


class StateTracker:
    """The states of one rank through one rollout phase.

    A span ends at the same reading of the clock at which the next one begins: no gap, no overlap.
    """

    def __init__(self, clock: Callable[[], float]):
        """The phase begins now, BUSY."""
        self._clock = clock
        self.state = RankState.BUSY
        self._since = clock()
        self._spans: list[StateSpan] = []

    def to(self, state: RankState) -> None:
        """Goes to `state` now, if it is another one."""
        if state is not self.state:
            self._close()
            self.state = state

    def finish(self) -> tuple[StateSpan, ...]:
        """Ends the phase now and returns its spans, in order. The tracker cannot be used afterwards."""
        self._close()
        return tuple(self._spans)

    def _close(self) -> None:
        now = self._clock()
        self._spans.append(StateSpan(self.state, self._since, now))
        self._since = now


def seconds_in(spans: tuple[StateSpan, ...], *states: RankState) -> float:
    """Seconds of all spans in any of `states`."""
    return sum(span.seconds for span in spans if span.state in states)
