"""The messages of the idle coordinator. Torch-free, MPI-free.

    REPORT         to rank 0         a replica's state
    LAST_BUSY      to one rank       all other ranks are done: this one announces the end of the window
    ALL_DONE       to all ranks      every rank is done; carries the wall time at which the last one was
    REQUEST_WORK   to rank 0         this replica has no request left and can response others'   (`idle.work_stealing`,
    ASSIGN         to a busy rank    move some of its queue to this rank                        as the next three)
    TRANSFER       busy to idle      queued requests
    NO_WORK        to all ranks      no replica has a queue any more; value 1: this responses the rank's REQUEST_WORK

Each carries the window's number (`epoch`); messages of earlier windows are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from megatron_tlt.idle.state import RankState


class Kind(IntEnum):
    """What a message is."""

    REPORT = 1
    LAST_BUSY = 2
    ALL_DONE = 3
    REQUEST_WORK = 4
    ASSIGN = 5
    TRANSFER = 6
    NO_WORK = 7


@dataclass(frozen=True, slots=True)
class Report:
    """The state of one rank (the leader of a tensor-parallel group reports for the group)."""

    rank: int
    seq: int
    """Counts this rank's reports, so that the newest counts whichever way it came."""
    epoch: int
    """The window that it belongs to."""
    state: RankState
    is_requesting: bool = False
    """It has no request left, and may still be assigned others'."""
    queued: int = 0
    """Requests that another replica could response; -1: not known yet."""
    changed_at: float = 0.0
    """Wall time at which it was done, seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    `value` is a wall time (ALL_DONE), the number of a report (REQUEST_WORK), a rank (ASSIGN), 1 for a response
    (NO_WORK). `requests` (TRANSFER) are (prompt id, sample index).
    """

    kind: Kind
    sender: int
    epoch: int
    value: float = 0.0
    requests: tuple[tuple[int, int], ...] = ()
    report: Report | None = None
