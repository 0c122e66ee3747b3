"""What a rank is doing, in memory that its watchdog process reads: still there when the rank is killed. Stdlib only.

Two slots are written in turn, each with a checksum: a reader takes the newest whole one, so a rank that dies in the
middle of a write leaves the one before. A write takes microseconds and never waits.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from dataclasses import dataclass, replace

_BODY = struct.Struct("<QQq32s12sdddqqqd")
_CRC = struct.Struct("<I")
_SLOT = 256
SIZE = 2 * _SLOT


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A moment of one rank. Times are seconds of `time.monotonic`, which all processes of a host share."""

    count: int = 0
    """Writes so far."""
    order: int = 0
    """Phases entered so far: ranks go through the same ones, so who has the lowest is behind."""
    step: int = -1
    phase: str = "start"
    state: str = ""
    """Of an idle window: BUSY, IDLE or TRAINING; empty elsewhere."""
    phase_at: float = 0.0
    """When the phase began."""
    pulse_at: float = 0.0
    """The last sign of life."""
    limit: float = 0.0
    """Seconds that the phase should not exceed, from its own history; 0: not known yet."""
    running: int = 0
    """Requests that the engine decodes."""
    queued: int = 0
    """Requests that wait in the engine."""
    longest: int = 0
    """Tokens of the longest running answer."""
    left: float = 0.0
    """Tokens still expected of this replica."""


def _pack(s: Snapshot) -> bytes:
    texts = s.phase.encode()[:32], s.state.encode()[:12]
    times = s.phase_at, s.pulse_at, s.limit
    body = _BODY.pack(s.count, s.order, s.step, *texts, *times, s.running, s.queued, s.longest, s.left)
    return body + _CRC.pack(zlib.crc32(body))


def _unpack(data: bytes) -> Snapshot | None:
    """None for a slot that was never or only half written."""
    body = data[: _BODY.size]
    (crc,) = _CRC.unpack_from(data, _BODY.size)
    if crc != zlib.crc32(body):
        return None
    count, order, step, phase, state, *rest = _BODY.unpack(body)
    phase, state = (text.rstrip(b"\0").decode(errors="replace") for text in (phase, state))
    return Snapshot(count, order, step, phase, state, *rest)


class Block:
    """`SIZE` bytes of a file, mapped. One process writes, others read."""

    def __init__(self, fd: int):
        """`fd` must be open for reading and writing and hold at least `SIZE` bytes; it may be closed afterwards."""
        self._map = mmap.mmap(fd, SIZE)
        self._last = Snapshot()

    def write(self, snapshot: Snapshot) -> None:
        """Publishes it; `count` is set here."""
        self._last = replace(snapshot, count=self._last.count + 1)
        data = _pack(self._last)
        at = (self._last.count % 2) * _SLOT
        self._map[at : at + len(data)] = data

    def read(self) -> Snapshot:
        """The newest whole snapshot; an empty one before the first."""
        found = [_unpack(self._map[at : at + _SLOT]) for at in (0, _SLOT)]
        return max((s for s in found if s is not None), key=lambda s: s.count, default=Snapshot())

    def close(self) -> None:
        """Unmaps it."""
        self._map.close()
