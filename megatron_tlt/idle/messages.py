"""What ranks say to each other, as bytes: a head of 24 and up to 32 reports of 56, or 112 pieces of work of 16.
Torch-free, MPI-free.

    REPORT  up      a rank's state (a sub-leader's: those of its members that have news)
    TAIL    down    seconds until the slowest replica is expected to be done
    LAST    down    to one rank: all others are done, you are the one they wait for
    OVER    to all  every rank is done; carries the wall time at which the last one was
    ASK     up      this replica is dry and would take requests over   (`idle.takeover`, as the next three)
    GRANT   down    to a replica with a queue: give some of it to this rank
    GIVE    across  queued requests, in pieces
    DRY     down    nobody has a queue any more; 1: and that is the answer to your ASK

Each carries the window's number (`epoch`); what belongs to an earlier window is dropped.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from megatron_tlt.errors import CoordinatorError
from megatron_tlt.idle.state import RankState

_HEAD = struct.Struct("<BxHIqd")  # kind, reports, sender, epoch, value
_REPORT = struct.Struct("<IIqB?xxIIiddd")
_PIECE = struct.Struct("<qII")
MAX_REPORTS, MAX_PIECES = 32, 112
MAX_BYTES = (
    _HEAD.size + MAX_REPORTS * _REPORT.size
)  # small enough to be sent without waiting for the receiver


class Kind(IntEnum):
    """What a message is."""

    REPORT = 1
    TAIL = 2
    LAST = 3
    OVER = 4
    ASK = 5
    GRANT = 6
    GIVE = 7
    DRY = 8


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank says of itself."""

    rank: int
    seq: int
    """Counts this rank's reports, so that the newest wins however it travelled."""
    epoch: int
    """The window that it speaks of."""
    state: RankState
    running: int = 0
    """Live and queued requests."""
    steps: int = 0
    """Micro-steps of this window."""
    tokens_left: float = 0.0
    """Tokens still expected of this replica."""
    tokens_per_second: float = 0.0
    """How fast it makes them; 0: not known."""
    changed_at: float = 0.0
    """Wall time of its last transition, seconds since 1970."""
    queued: int = 0
    """Requests that another replica could take over; -1: not known yet."""
    asks: bool = False
    """It is dry, and may still take over some."""


@dataclass(frozen=True, slots=True)
class RequestRange:
    """Samples `first` to `first + count - 1` of one prompt."""

    prompt_id: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    `value` means seconds (TAIL), wall time (OVER), a report's number (ASK), a rank (GRANT), 1 for the last of several
    (GIVE) or for an answer (DRY).
    """

    kind: Kind
    sender: int
    epoch: int
    value: float = 0.0
    reports: tuple[Report, ...] = ()
    pieces: tuple[RequestRange, ...] = ()


def pack(
    kind: Kind,
    sender: int,
    epoch: int,
    value: float = 0.0,
    reports: Sequence[Report] = (),
    pieces: Sequence[RequestRange] = (),
) -> bytearray:
    """The bytes of a message with at most MAX_REPORTS reports (a REPORT) or MAX_PIECES pieces (all others)."""
    body = _pack_reports(reports) if kind is Kind.REPORT else b"".join(map(_pack_piece, pieces))
    count = len(reports) if kind is Kind.REPORT else len(pieces)
    assert len(body) <= MAX_BYTES - _HEAD.size
    return bytearray(_HEAD.pack(kind, count, sender, epoch, value) + body)


def _pack_reports(reports: Sequence[Report]) -> bytes:
    assert len(reports) <= MAX_REPORTS
    parts = []
    for r in reports:
        numbers = (r.running, r.steps, r.queued, r.tokens_left, r.tokens_per_second, r.changed_at)
        parts.append(_REPORT.pack(r.rank, r.seq, r.epoch, r.state, r.asks, *numbers))
    return b"".join(parts)


def _pack_piece(piece: RequestRange) -> bytes:
    return _PIECE.pack(piece.prompt_id, piece.first, piece.count)


def unpack(data: bytes | bytearray) -> Message:
    """The message in the first bytes of `data`. Raises CoordinatorError for bytes that are none."""
    kind, count, sender, epoch, value = _HEAD.unpack_from(data)
    most = MAX_REPORTS if kind == Kind.REPORT else MAX_PIECES
    if kind not in Kind.__members__.values() or count > most:
        raise CoordinatorError(f"rank {sender} sent no message of ours: kind {kind}, {count} parts")
    if kind == Kind.REPORT:
        return Message(Kind.REPORT, sender, epoch, value, reports=_unpack_reports(data, count))
    ends = _HEAD.size + count * _PIECE.size
    pieces = tuple(RequestRange(*fields) for fields in _PIECE.iter_unpack(memoryview(data)[_HEAD.size : ends]))
    return Message(Kind(kind), sender, epoch, value, pieces=pieces)


def _unpack_reports(data: bytes | bytearray, count: int) -> tuple[Report, ...]:
    reports = []
    for i in range(count):
        fields = _REPORT.unpack_from(data, _HEAD.size + i * _REPORT.size)
        rank, seq, epoch, state, asks, running, steps, queued, left, speed, changed_at = fields
        state = RankState(state)
        reports.append(Report(rank, seq, epoch, state, running, steps, left, speed, changed_at, queued, asks))
    return tuple(reports)
