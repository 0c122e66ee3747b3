"""One job to a run directory: `RUN_DIR/lock`, held by rank 0 as long as the job lives. Torch-free, no wall clock.

Two things hold it, for no single one works everywhere:

    flock     the kernel lets go of it when the process dies, however it dies. On one machine this alone decides.
    beat      the owner counts up a number in the file. Some network file systems keep flock to one machine: so who gets
              the flock of a file that a process on another machine wrote looks whether the number still grows

A file left by a killed job on another machine therefore costs a wait of a few beats; one left on this machine, or by a
job that ended orderly, costs nothing. Clocks of different machines are never compared.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.errors import RunDirectoryError

if TYPE_CHECKING:
    from megatron_tlt.distributed.world import World

_log = logging.getLogger(__name__)

LOCK = "lock"
BEAT_SECONDS = 2.0
_SILENT_BEATS = 5  # an owner that misses so many is gone
_NO_FLOCK = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})


@dataclass(frozen=True)
class Owner:
    """Who holds a run directory. `machine` names the running kernel: host names of containers may be anything."""

    host: str
    machine: str
    pid: int
    job: str
    token: str
    beat: int = 0

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}"


class RunLock:
    """The lock of one run directory. `acquire` once; `check` now and then; `release` at the end."""

    def __init__(self, run_dir: str | Path, beat_seconds: float = BEAT_SECONDS):
        self._path, self._beat_seconds = Path(run_dir) / LOCK, beat_seconds
        job = os.environ.get("SLURM_JOB_ID", "")
        self._me = Owner(socket.gethostname(), machine_id(), os.getpid(), job, os.urandom(8).hex())
        self._fd = -1
        self._stop = threading.Event()
        self._beats: threading.Thread | None = None
        self._lost: str | None = None

    def acquire(self) -> None:
        """Takes the lock. Raises RunDirectoryError that names the owner, if there is a living one."""
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            has_flock = self._flock()
            before = self._read()
            local = before is not None and has_flock and before.machine == self._me.machine
            if before is not None and not local and self._still_beats(before):
                raise self._refusal(before)
            self._write(0)
            if before is not None and not local:
                self._settle()
        except BaseException:
            os.close(self._fd)
            self._fd = -1
            raise
        self._beats = threading.Thread(target=self._keep_beating, name="run-lock", daemon=True)
        self._beats.start()

    def check(self) -> None:
        """Raises RunDirectoryError if another job took the directory over (this one had been stopped for long)."""
        if self._lost is not None:
            raise RunDirectoryError(
                f"{self._path.parent} was taken over by {self._lost}: this job must not go on"
            )

    def release(self) -> None:
        """Lets go. Idempotent."""
        if self._fd < 0:
            return
        self._stop.set()
        if self._beats is not None:
            self._beats.join()
        if self._lost is None:
            os.ftruncate(self._fd, 0)
        os.close(self._fd)
        self._fd = -1

    def _remake(self) -> None:
        old, self._fd = self._fd, os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        os.close(old)
        self._flock()

    def _flock(self) -> bool:
        """False where the file system has no such locks."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise self._refusal(self._read()) from error
        except OSError as error:
            if error.errno in _NO_FLOCK:
                return False
            raise
        return True

    def _refusal(self, owner: Owner | None) -> RunDirectoryError:
        who = "another job" if owner is None else str(owner)
        return RunDirectoryError(
            f"train.run_dir = {self._path.parent} is in use by {who}: wait for it, end it, or name another directory"
        )

    def _still_beats(self, before: Owner) -> bool:
        """Watches the file for as long as a living owner could be silent."""
        patience = _SILENT_BEATS * self._beat_seconds
        _log.info("%s names %s: looking for %g s whether it lives", self._path, before, patience)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            time.sleep(self._beat_seconds / 4)
            now = self._read()
            if now is None:  # it ended orderly
                return False
            if (now.token, now.beat) != (before.token, before.beat):
                return True
        return False

    def _settle(self) -> None:
        """Two jobs may find the same dead owner at once: the one that wrote last stays."""
        time.sleep(2 * self._beat_seconds)
        now = self._read()
        if now is None or now.token != self._me.token:
            raise self._refusal(now)

    def _keep_beating(self) -> None:
        beat = 0
        while not self._stop.wait(self._beat_seconds):
            try:
                if not self._path.exists():  # somebody tidied up: the lock must be found again
                    self._remake()
                now = self._read()
                if now is not None and now.token != self._me.token:
                    self._lost = str(now)
                    return
                beat += 1
                self._write(beat)
            except RunDirectoryError as error:
                self._lost = str(error)
                return
            except OSError:
                continue  # a full or absent disk: others may then think that this job is gone

    def _read(self) -> Owner | None:
        """The owner in the file, opened anew: network file systems look at the server only then."""
        try:
            values: Any = json.loads(self._path.read_text(encoding="utf-8"))
            host, machine, job, token = (str(values[name]) for name in ("host", "machine", "job", "token"))
            return Owner(host, machine, int(values["pid"]), job, token, int(values["beat"]))
        except (FileNotFoundError, ValueError, TypeError, KeyError):  # nobody, or a write that a crash tore
            return None

    def _write(self, beat: int) -> None:
        text = json.dumps({**asdict(self._me), "beat": beat}).encode()
        # One write of one length: a reader sees the old number or the new one.
        os.pwrite(self._fd, text.ljust(512), 0)
        os.fsync(self._fd)


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
