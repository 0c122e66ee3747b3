"""What ranks say to each other, as bytes: a head of 24 and up to 32 reports of 52. Torch-free, MPI-free.

    REPORT  up      a rank's state (a sub-leader's: those of its members that have news)
    TAIL    down    seconds until the slowest replica is expected to be done
    LAST    down    to one rank: all others are done, you are the one they wait for
    OVER    to all  every rank is done; carries the wall time at which the last one was

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
_REPORT = struct.Struct("<IIqBxxxIIddd")
MAX_REPORTS = 32
MAX_BYTES = (
    _HEAD.size + MAX_REPORTS * _REPORT.size
)  # small enough to be sent without waiting for the receiver


class Kind(IntEnum):
    """What a message is."""

    REPORT = 1
    TAIL = 2
    LAST = 3
    OVER = 4


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


@dataclass(frozen=True, slots=True)
class Message:
    """One message; `value` means seconds (TAIL) or wall time (OVER)."""

    kind: Kind
    sender: int
    epoch: int
    value: float = 0.0
    reports: tuple[Report, ...] = ()


def pack(
    kind: Kind, sender: int, epoch: int, value: float = 0.0, reports: Sequence[Report] = ()
) -> bytearray:
    """The bytes of a message with at most MAX_REPORTS reports."""
    assert len(reports) <= MAX_REPORTS
    data = bytearray(_HEAD.size + len(reports) * _REPORT.size)
    _HEAD.pack_into(data, 0, kind, len(reports), sender, epoch, value)
    for i, r in enumerate(reports):
        at = _HEAD.size + i * _REPORT.size
        numbers = (r.running, r.steps, r.tokens_left, r.tokens_per_second, r.changed_at)
        _REPORT.pack_into(data, at, r.rank, r.seq, r.epoch, r.state, *numbers)
    return data


def unpack(data: bytes | bytearray) -> Message:
    """The message in the first bytes of `data`. Raises CoordinatorError for bytes that are none."""
    kind, count, sender, epoch, value = _HEAD.unpack_from(data)
    if kind not in Kind.__members__.values() or count > MAX_REPORTS:
        raise CoordinatorError(f"rank {sender} sent no message of ours: kind {kind}, {count} reports")
    reports = []
    for i in range(count):
        rank, seq, of_epoch, state, *numbers = _REPORT.unpack_from(data, _HEAD.size + i * _REPORT.size)
        reports.append(Report(rank, seq, of_epoch, RankState(state), *numbers))
    return Message(Kind(kind), sender, epoch, value, tuple(reports))
