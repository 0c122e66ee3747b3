"""The messages of the idle coordinator, as bytes: a head of 24, then a report of 48 or up to 100 request ranges of 16.
Torch-free, MPI-free.

    REPORT         to rank 0         a replica's state
    EXPECTED_WAIT  to idle ranks     seconds until the slowest replica is expected to be done
    LAST_BUSY      to one rank       all other ranks are done: this one announces the end of the window
    ALL_DONE       to all ranks      every rank is done; carries the wall time at which the last one was
    REQUEST_WORK   to rank 0         this replica has no request left and can answer others'   (`idle.work_stealing`,
    ASSIGN         to a busy rank    move some of its queue to this rank                        as the next three)
    TRANSFER       busy to idle      queued requests, as ranges of samples
    NO_WORK        to all ranks      no replica has a queue any more; value 1: this answers the rank's REQUEST_WORK

Each carries the window's number (`epoch`); messages of earlier windows are dropped.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from megatron_tlt.errors import CoordinatorError
from megatron_tlt.idle.state import RankState

_HEAD = struct.Struct("<BxHIqd")  # kind, number of ranges, sender, epoch, value
_REPORT = struct.Struct("<IIqB?xxiddd")
_RANGE = struct.Struct("<qII")
MAX_RANGES = 100  # of one message
MAX_BYTES = _HEAD.size + MAX_RANGES * _RANGE.size  # small enough for MPI's eager protocol: a send never waits


class Kind(IntEnum):
    """What a message is."""

    REPORT = 1
    EXPECTED_WAIT = 2
    LAST_BUSY = 3
    ALL_DONE = 4
    REQUEST_WORK = 5
    ASSIGN = 6
    TRANSFER = 7
    NO_WORK = 8


@dataclass(frozen=True, slots=True)
class Report:
    """The state of one rank (the leader of a tensor-parallel group reports for the group). Fields as in `_REPORT`."""

    rank: int
    seq: int
    """Counts this rank's reports, so that the newest counts whichever way it came."""
    epoch: int
    """The window that it belongs to."""
    state: RankState
    is_requesting: bool = False
    """It has no request left, and may still be assigned others'."""
    queued: int = 0
    """Requests that another replica could answer; -1: not known yet."""
    tokens_left: float = 0.0
    """Tokens still expected of this replica."""
    tokens_per_second: float = 0.0
    """Its speed; 0: not known."""
    changed_at: float = 0.0
    """Wall time of its last transition, seconds since 1970."""


@dataclass(frozen=True, slots=True)
class RequestRange:
    """Samples `first` to `first + count - 1` of one prompt."""

    prompt_id: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    `value` is seconds (EXPECTED_WAIT), a wall time (ALL_DONE), the number of a report (REQUEST_WORK), a rank (ASSIGN),
    1 for the last of several (TRANSFER) or for an answer (NO_WORK).
    """

    kind: Kind
    sender: int
    epoch: int
    value: float = 0.0
    ranges: tuple[RequestRange, ...] = ()
    report: Report | None = None

    def pack(self) -> bytearray:
        """The message's bytes; at most MAX_RANGES ranges."""
        assert len(self.ranges) <= MAX_RANGES
        data = bytearray(_HEAD.pack(self.kind, len(self.ranges), self.sender, self.epoch, self.value))
        if self.report is not None:
            data += _REPORT.pack(*(getattr(self.report, name) for name in Report.__slots__))
        for some in self.ranges:
            data += _RANGE.pack(some.prompt_id, some.first, some.count)
        return data


def unpack(data: bytes | bytearray) -> Message:
    """The message in the first bytes of `data`. Raises CoordinatorError for bytes that are no message."""
    kind, count, sender, epoch, value = _HEAD.unpack_from(data)
    if kind not in Kind.__members__.values() or count > MAX_RANGES:
        raise CoordinatorError(f"rank {sender} sent bytes that are no message: kind {kind}, {count} ranges")
    if kind == Kind.REPORT:
        rank, seq, of, state, *figures = _REPORT.unpack_from(data, _HEAD.size)
        return Message(Kind.REPORT, sender, epoch, value, report=Report(rank, seq, of, RankState(state), *figures))
    body = memoryview(data)[_HEAD.size : _HEAD.size + count * _RANGE.size]
    ranges = tuple(RequestRange(*fields) for fields in _RANGE.iter_unpack(body))
    return Message(Kind(kind), sender, epoch, value, ranges)
