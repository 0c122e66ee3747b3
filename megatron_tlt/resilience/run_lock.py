"""One job to a run directory: rank 0 holds an flock on `RUN_DIR/lock`, which names host, process and job. Torch-free.

The kernel releases the lock when the process dies, however it dies. On a network file system it excludes jobs of other
machines only where flock holds for the whole cluster (NFS 4, Lustre with `-o flock`).
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_tlt.errors import ConfigError, RunDirectoryError, shortened
from megatron_tlt.observe.files import naming

if TYPE_CHECKING:
    from megatron_tlt.distributed.world import World

_log = logging.getLogger(__name__)

LOCK = "lock"
_LOOKS = 60  # a second apart: an NFS client keeps what it has seen of a directory for that long (`acdirmax`)
_MADE = LOCK, "status", "stacks", "events"  # what is in a run's directory before its checkpoint is accepted


class RunLock:
    """The lock of one run directory. `acquire` once; `release` at the end."""

    def __init__(self, run_dir: str | Path):
        self._run_dir = Path(run_dir)
        self._fd = -1

    def acquire(self) -> str:
        """Takes the lock; returns the text in its file. Raises RunDirectoryError that names the owner, if another job
        has it.
        """
        fd = os.open(self._run_dir / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(fd, 4096, 0).decode(errors="replace").strip() or "another job"
            os.close(fd)
            raise RunDirectoryError(
                f"run directory {self._run_dir} is in use by {owner}: wait for it, end it, or name another directory"
            ) from error
        except OSError as error:
            _log.warning("%s cannot be locked (%s): start no second job in it", self._run_dir, error.strerror)
        job = os.environ.get("SLURM_JOB_ID")
        owner = f"process {os.getpid()} on {socket.gethostname()}" + (f", job {job}" if job else "")
        with naming(self._run_dir / LOCK):
            os.ftruncate(fd, 0)
            os.pwrite(fd, owner.encode(), 0)
            os.fsync(fd)  # for other hosts
        self._fd = fd
        return owner

    def release(self) -> None:
        """Gives the lock back. Idempotent."""
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1


def lock_run_dir(
    field: str, value: str, run_dir: Path, world: World, sleep: Callable[[float], None] = time.sleep
) -> RunLock | None:
    """Makes the run directory that `field` = `value` names; rank 0's lock of it. Collective.

    A start that is refused afterwards takes back what it has made there (`World.refuse`). Raises ConfigError where it
    cannot be made, on every rank ConfigError if it is not the same one on all hosts, RunDirectoryError if another job
    uses it.
    """
    # Rank 0 alone: where NFS has no file, a host that has looked takes it for missing for a while after it is made.
    take_back = _take_back(run_dir) if world.is_main else None
    world.barrier()  # rank 0 has looked before any rank makes it
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)  # only the user may read responses and weights
    except OSError as error:
        raise ConfigError.of(field, value, f"cannot be made: {error.strerror}") from error
    lock = RunLock(run_dir) if world.is_main else None
    problem, owner = "", ""
    if lock is not None:
        try:
            owner = lock.acquire()
        except RunDirectoryError as error:
            problem = str(error)
    problem, owner = world.broadcast_object((problem, owner))
    if problem:
        raise RunDirectoryError(problem)
    if take_back is not None:
        world.at_refusal(take_back)
    is_there = _finds(run_dir / LOCK, owner, sleep)
    world.wait_for_all()  # a look may take longer than a collective may
    hosts = world.all_gather_object("" if is_there else socket.gethostname())
    if apart := sorted({host for host in hosts if host}):
        allowed = f"is not on a disk that all hosts share: rank 0's file `{LOCK}` is not there on {shortened(apart)}"
        raise ConfigError.of(field, value, allowed)
    return lock


def _finds(file: Path, text: str, sleep: Callable[[float], None]) -> bool:
    """Whether `file` has `text`, at once or within a minute: where it has not, the directory is another host's disk, to
    which its part of each checkpoint would go.
    """
    for _ in range(_LOOKS):
        with suppress(OSError):
            if file.read_bytes() == text.encode():
                return True
        sleep(1)
    return False


def _take_back(run_dir: Path) -> Callable[[], None]:
    """A function that removes what a start makes in `run_dir` and what is not there now, directories above it too."""
    place = run_dir.absolute()
    missing = [directory for directory in (place, *place.parents) if not directory.exists()]
    new = [place / name for name in _MADE if not (place / name).exists()]

    def take_back() -> None:
        for path in new:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        with suppress(OSError):  # something else is in it
            for directory in missing:
                directory.rmdir()

    return take_back
