"""The three states of a rank, the transitions between them, and how long each lasted. Torch-free, MPI-free.

    BUSY ----> IDLE <----> TRAINING
      ^          |            |
      +----------+------------+

BUSY: the replica has live or queued requests. IDLE: it has none, and others do. TRAINING: idle, and training the
drafter. A window ends with BUSY (the step goes on). Within a window BUSY follows IDLE where requests were stolen, and
IDLE follows TRAINING where training stops first: enough micro-steps, no data, the wait nearly over, or a failure.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from megatron_tlt.errors import CoordinatorError

if TYPE_CHECKING:
    from megatron_tlt.interfaces import Clock


class RankState(IntEnum):
    """What a rank does during the rollout phase. The numbers travel in messages."""

    BUSY = 0
    IDLE = 1
    TRAINING = 2


TRANSITIONS: dict[RankState, frozenset[RankState]] = {
    RankState.BUSY: frozenset({RankState.IDLE}),
    RankState.IDLE: frozenset({RankState.TRAINING, RankState.BUSY}),
    RankState.TRAINING: frozenset({RankState.IDLE, RankState.BUSY}),
}


def check_transition(old: RankState, new: RankState) -> None:
    """Raises CoordinatorError, naming both states and what is allowed, unless `new` may follow `old`."""
    if new not in TRANSITIONS[old]:
        allowed = " or ".join(sorted(state.name for state in TRANSITIONS[old]))
        raise CoordinatorError(f"a rank cannot go from {old.name} to {new.name}: only {allowed} may follow")


class MonotonicClock:
    """A `Clock` of real time."""

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        return time.perf_counter()


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

    def __init__(self, clock: Clock):
        """The phase begins now, BUSY."""
        self._clock = clock
        self.state = RankState.BUSY
        self._since = clock.now()
        self._spans: list[StateSpan] = []

    def to(self, state: RankState) -> None:
        """Goes to another state now. Raises CoordinatorError for a transition that is not in the table."""
        check_transition(self.state, state)
        self._close()
        self.state = state

    def finish(self) -> tuple[StateSpan, ...]:
        """Ends the phase now and returns its spans, in order. The tracker cannot be used afterwards."""
        self._close()
        return tuple(self._spans)

    def _close(self) -> None:
        now = self._clock.now()
        self._spans.append(StateSpan(self.state, self._since, now))
        self._since = now


def seconds_in(spans: tuple[StateSpan, ...], *states: RankState) -> float:
    """Seconds of all spans in any of `states`."""
    return sum(span.seconds for span in spans if span.state in states)
