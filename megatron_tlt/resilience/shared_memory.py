"""Removing the files of killed jobs from /dev/shm. Stdlib only.

Weights go to engines of other processes in `tlt-...` directories; their owner holds a flock on them as long as it
lives. Files of other users, young ones and locked ones stay.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

_OURS = re.compile(r"tlt-\w+")
_YOUNG_S = 10.0  # a job that starts now may not have locked a directory yet that it has just made


def sweep_shared_memory(folder: Path = Path("/dev/shm"), young_s: float = _YOUNG_S) -> list[str]:
    """Removes directories of weights in `folder` that this user owns and no process locks; returns their names."""
    removed = []
    with suppress(OSError):  # there is no such folder
        for entry in os.scandir(folder):
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                is_old = time.time() - max(status.st_mtime, status.st_ctime) > young_s
                is_ours = status.st_uid == os.getuid() and is_old and entry.is_dir(follow_symlinks=False)
                if is_ours and _OURS.fullmatch(entry.name) and _remove_unlocked(Path(entry.path)):
                    removed.append(entry.name)
    return removed


def _remove_unlocked(directory: Path) -> bool:
    with suppress(OSError):  # another process holds it, or has removed it
        fd = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory)
            return True
        finally:
            os.close(fd)
    return False
