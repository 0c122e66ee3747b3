"""Which rank of this host died first, even if nobody was awake to see it. Linux. Stdlib only.

Every rank holds a file open as long as it lives. The kernel closes it at the rank's death and tells whoever watches the
directory (inotify), in the order in which it happened: a watchdog that comes late, on a busy host, still reads who was
first and who was only ended with the job.
"""

from __future__ import annotations

import ctypes
import os
import struct
from contextlib import suppress
from pathlib import Path

_CLOSED = 0x8  # IN_CLOSE_WRITE
_HEAD = struct.Struct("iIII")  # watch, mask, cookie, length of the name


def alive_dir(run_dir: str | Path) -> Path:
    """Where the files are that living ranks hold open."""
    return Path(run_dir) / "status" / "alive"


def hold_open(run_dir: str | Path, rank: int) -> int:
    """A file descriptor that is open as long as this rank lives, or until it closes it."""
    path = alive_dir(run_dir) / f"{rank:05d}"
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)


class Deaths:
    """The order of deaths on this host since it was made. Knows nothing where there is no inotify."""

    def __init__(self, run_dir: str | Path):
        self._fd = -1
        self._ranks: list[int] = []
        with suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None)
            fd = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
            if fd >= 0 and libc.inotify_add_watch(fd, os.fsencode(alive_dir(run_dir)), _CLOSED) >= 0:
                self._fd = fd

    def ranks(self) -> list[int]:
        """The ranks that have died or closed their file, the first one first."""
        with suppress(OSError):  # nothing more to read
            while self._fd >= 0 and (data := os.read(self._fd, 65536)):
                self._take(data)
        return list(self._ranks)

    def _take(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            *_, length = _HEAD.unpack_from(data, at)
            at += _HEAD.size
            name = data[at : at + length].rstrip(b"\0")
            at += length
            if name.isdigit() and int(name) not in self._ranks:
                self._ranks.append(int(name))
