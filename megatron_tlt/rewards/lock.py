"""The lock of a pool's workers, without a name in /dev/shm."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from multiprocessing import reduction
from typing import Any

_POLL_S = 0.001  # a worker holds the lock for as long as it takes to read one job


class FileLock:
    """A recursive lock of processes, as `multiprocessing.RLock`; one thread of each process may use it.

    multiprocessing's own is a named semaphore, which stays in /dev/shm when the rank and Python's resource tracker are
    killed. This lock is a record lock of a file that has no name: the system releases it when its holder dies, and
    removes it with the last process that has it open.
    """

    def __init__(self) -> None:
        with tempfile.TemporaryFile() as file:
            self._fd = os.dup(file.fileno())
        self._depth = 0

    def __getstate__(self) -> Any:
        return reduction.DupFd(self._fd)  # type: ignore[attr-defined]

    def __setstate__(self, state: Any) -> None:
        self._fd, self._depth = state.detach(), 0

    def __del__(self) -> None:
        os.close(self._fd)

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Whether the lock is held now, within `timeout` seconds (None: however long it takes) where `block`."""
        end = None if timeout is None else time.monotonic() + timeout
        while self._depth == 0:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:  # another process holds it
                if not block or (end is not None and time.monotonic() >= end):
                    return False
                time.sleep(_POLL_S)
        self._depth += 1
        return True

    def release(self) -> None:
        """Undoes one `acquire`."""
        self._depth -= 1
        if self._depth == 0:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)
