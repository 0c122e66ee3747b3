"""Directories of a rank and of the processes beside it that the next job on the machine removes if their owner was
killed, and old logs of engines. Stdlib only.

The owner holds a flock on its directory as long as it lives. Those of other users, young ones and locked ones stay.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

# The beginning of names in the temporary directory. With the machine's: on a disk that machines share, a flock on a
# directory holds on its own machine only.
OF_MACHINE = f"tlt-{os.uname().nodename}-"
_RANDOM = "[a-z0-9_]{8}"  # the end of a name of `tempfile`
_YOUNG_S = 10.0  # a job that starts now may not have locked a directory yet that it has just made
_LOG_S = 7 * 86400.0  # for so long a log stays to be read: of an engine that failed, or whose rank was killed


class ScratchDirectory:
    """A directory that is private to this user, and that a later job removes if this process could not."""

    def __init__(self, prefix: str = OF_MACHINE, folder: Path | None = None) -> None:
        """In `folder` (default: the temporary directory)."""
        self._directory = tempfile.TemporaryDirectory(prefix=prefix, dir=folder)
        self.path = Path(self._directory.name)
        self._lock = os.open(self.path, os.O_RDONLY)
        show_use(self._lock)

    def close(self) -> None:
        """Removes it. A second call does nothing."""
        self._directory.cleanup()
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


def show_use(fd: int) -> None:
    """Keeps later jobs from removing an open file or directory until it is closed here and in every process that has
    inherited it.
    """
    with suppress(OSError):  # a disk without flock, on which no job can lock it, and so none removes it
        fcntl.flock(fd, fcntl.LOCK_SH)


def sweep_scratch(shared: Path = Path("/dev/shm"), young_s: float = _YOUNG_S) -> list[str]:
    """Removes what this user owns and no process locks: directories in `shared` and in the temporary directory, and
    logs of engines there; returns their names.
    """
    removed = _sweep(shared, r"tlt-\w+", young_s)
    with suppress(OSError):  # there is no temporary directory
        removed += _sweep(Path(tempfile.gettempdir()), rf"{re.escape(OF_MACHINE)}{_RANDOM}(\.log)?", young_s)
    return removed


def _sweep(folder: Path, names: str, young_s: float) -> list[str]:
    removed = []
    with suppress(OSError):  # there is no such folder
        for entry in os.scandir(folder):
            if re.fullmatch(names, entry.name) is None:
                continue
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                age, is_log = time.time() - max(status.st_mtime, status.st_ctime), entry.name.endswith(".log")
                is_kind = entry.is_dir(follow_symlinks=False) != is_log
                is_ours = is_kind and status.st_uid == os.getuid() and age > (_LOG_S if is_log else young_s)
                if is_ours and _remove_unlocked(Path(entry.path), is_log):
                    removed.append(entry.name)
    return removed


def _remove_unlocked(path: Path, is_file: bool) -> bool:
    with suppress(OSError):  # another process holds it, or has removed it
        fd = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_file:
                path.unlink()
            else:
                shutil.rmtree(path)
            return True
        finally:
            os.close(fd)
    return False
