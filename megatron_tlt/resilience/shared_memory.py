"""Removing what killed jobs have left in /dev/shm. Stdlib only.

MPICH removes its `mpich_shm_...` files at its orderly end only: one of 1 MiB and more stays for each killed job, until
the machine starts again. So do the `tlt-...` directories in which weights go to engines of other processes; their
owner holds a flock on them. What this user does not own, what is young, and what a living process has open, mapped or
locked, is left alone.
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
_MPICH = re.compile(r"mpich_shm_[0-9a-f]+_\d+")
_YOUNG_S = 10.0  # a job that starts now may not have opened a file yet that it has just made


def sweep_shared_memory(folder: Path = Path("/dev/shm"), young_s: float = _YOUNG_S) -> list[str]:
    """Removes what is MPICH's or ours in `folder`, of this user, and held by no living process; returns the names."""
    found, directories = [], []
    with suppress(OSError):  # there is no such folder
        for entry in os.scandir(folder):
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                is_old = time.time() - max(status.st_mtime, status.st_ctime) > young_s
                if status.st_uid != os.getuid() or not is_old or entry.is_symlink():
                    continue
                if _MPICH.fullmatch(entry.name) and entry.is_file():
                    found.append(entry.name)
                elif _OURS.fullmatch(entry.name) and entry.is_dir():
                    directories.append(entry.name)
    removed = [name for name in directories if _remove_unlocked(folder / name)]
    if not found:
        return removed
    used = _used_files(folder)  # after the names: a file made meanwhile is not among them
    unused = [name for name in found if str(folder / name) not in used]
    for name in unused:
        (folder / name).unlink(missing_ok=True)
    return removed + unused


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


def _used_files(folder: Path) -> set[str]:
    """Files of a folder that this user's processes have open or mapped; to others the files are closed (mode 0600)."""
    used = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            for line in (process / "maps").read_text(errors="replace").splitlines():
                if (at := line.find(f"{folder}/")) >= 0:
                    used.add(line[at:])
            for link in (process / "fd").iterdir():
                with suppress(OSError):
                    used.add(os.readlink(link))
    return used
