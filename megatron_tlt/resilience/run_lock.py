"""One job to a run directory: `RUN_DIR/lock`, held by rank 0 as long as the job lives. Torch-free.

    flock        the kernel releases it when the process dies, however it dies. On one machine this alone decides.
    heartbeats   some network file systems keep flock to one machine: where the last owner is not known to have been on
                 this one, the new job looks first whether heartbeats (`RUN_DIR/status`) still come

So a directory that a killed job left on another machine costs a wait of a few heartbeats; one left on this machine, or
by a job that ended orderly, costs nothing. Clocks of different machines are never compared.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_tlt.errors import RunDirectoryError
from megatron_tlt.resilience.heartbeat import Heartbeat, StatusFiles

if TYPE_CHECKING:
    from megatron_tlt.distributed.world import World

_log = logging.getLogger(__name__)

LOCK = "lock"
_MISSED = 4  # heartbeats without which a job is taken for dead
_SETTLE_S = 2.0  # for another job's write into the lock file to be visible here


class RunLock:
    """The lock of one run directory. `acquire` once; `check` now and then; `release` at the end."""

    def __init__(self, run_dir: str | Path, settle_s: float = _SETTLE_S):
        self._run_dir, self._path, self._settle_s = Path(run_dir), Path(run_dir) / LOCK, settle_s
        job = os.environ.get("SLURM_JOB_ID")
        name = f"process {os.getpid()} on {socket.gethostname()}" + (f", job {job}" if job else "")
        self._owner = {"name": name, "machine": machine_id(), "token": os.urandom(8).hex()}
        self._fd = -1

    def acquire(self) -> None:
        """Takes the lock. Raises RunDirectoryError that names the owner, if there is a living one."""
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            has_flock = self._flock()
            before = self._read()
            was_here = has_flock and before.get("machine") == self._owner["machine"]  # and is dead: flock was free
            if not was_here:
                self._refuse_if_alive(before)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps(self._owner).encode(), 0)
            os.fsync(self._fd)
            if before and not was_here:  # two jobs may find the same dead owner: the one that wrote last stays
                time.sleep(self._settle_s)
                self.check()
        except BaseException:
            os.close(self._fd)
            self._fd = -1
            raise

    def check(self) -> None:
        """Raises RunDirectoryError if another job took the directory over (this one had been stopped for long)."""
        owner = self._read()
        if owner and owner.get("token") != self._owner["token"]:
            raise RunDirectoryError(
                f"{self._run_dir} was taken over by {owner.get('name')}: this job must not go on"
            )

    def release(self) -> None:
        """Gives the lock back. Idempotent."""
        if self._fd < 0:
            return
        if self._read().get("token") == self._owner["token"]:
            os.ftruncate(self._fd, 0)
        os.close(self._fd)
        self._fd = -1

    def _flock(self) -> bool:
        """False where the file system has no such locks."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise self._refusal(self._read().get("name")) from error
        except OSError:
            return False
        return True

    def _refuse_if_alive(self, owner: dict[str, str]) -> None:
        """Looks whether heartbeats still come, as long as a living job could miss them. Raises RunDirectoryError."""
        first = self._newest()
        if first is None:
            return
        name = owner.get("name", f"a job on {first.host}")
        wait_s = _MISSED * first.heartbeat_s
        _log.info("%s may be in use by %s: waiting %g s for its heartbeats", self._run_dir, name, wait_s)
        end = time.monotonic() + wait_s
        while time.monotonic() < end:
            time.sleep(first.heartbeat_s / 4)
            newest = self._newest()
            if newest is None:  # it ended orderly
                return
            if (newest.start_id, newest.seq) != (first.start_id, first.seq):
                raise self._refusal(name)

    def _newest(self) -> Heartbeat | None:
        """Rank 0's heartbeat, unless it says that the rank has ended, or is this process's own, of a run before."""
        beat = StatusFiles(self._run_dir).read_heartbeats()[0].get(0)
        is_own = beat is not None and (beat.host, beat.pid) == (socket.gethostname(), os.getpid())
        return beat if beat is not None and beat.is_running and not is_own else None

    def _refusal(self, owner: str | None) -> RunDirectoryError:
        return RunDirectoryError(
            f"train.run_dir = {self._run_dir} is in use by {owner or 'another job'}: wait for it, end it, or name "
            "another directory"
        )

    def _read(self) -> dict[str, str]:
        """The owner in the file, opened anew (network file systems look at the server only then); empty: none."""
        try:
            owner = json.loads(self._path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # no file, or a write that a crash tore
            return {}
        return owner if isinstance(owner, dict) else {}


def machine_id() -> str:
    """Names the running kernel of this machine, the same in all of its containers; changes with a reboot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def lock_on_all(run_dir: Path, world: World) -> RunLock | None:
    """Rank 0's lock of the run directory, or the same error on every rank. Collective."""
    lock = RunLock(run_dir) if world.is_main else None
    problem: str | None = None
    if lock is not None:
        try:
            lock.acquire()
        except RunDirectoryError as error:
            problem = str(error)
    problem = world.broadcast_object(problem)
    if problem is not None:
        raise RunDirectoryError(problem)
    return lock
