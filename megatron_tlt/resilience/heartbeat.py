"""A rank's signs of life: its phase and progress in its status file, which the watchdog of its host looks at."""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import signal
import socket
import statistics
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.resilience.status_files import JobEnd, RankStatus, StatusFiles
from megatron_tlt.resilience.watchdog import ALL_STACKS_SIGNAL, WatchdogOptions, launch

if TYPE_CHECKING:
    from megatron_tlt.distributed.world import World
    from megatron_tlt.interfaces import RankOutcome

STACK_SIGNAL = signal.SIGQUIT  # writes the main thread's stack; sent by people
_HISTORY, _MIN_HISTORY = 32, 3  # durations of a phase that its limit is computed from
_SLOW_FACTOR, _SLOW_MIN_S = 3.0, 30.0  # a phase is slow beyond so many medians, and no shorter one is
_DEATH_S = 0.5  # for the watchdog to name a rank whose death caused this rank's error
_KILLED_S = 120.0  # for the watchdogs to end a job that hangs, when all stacks are written: 75 s, and looks
_log = logging.getLogger(__name__)


class Heartbeat:
    """One rank's status file. Phases are written at once, signs of life within them once a heartbeat interval."""

    def __init__(
        self,
        run_dir: str | Path,
        status: RankStatus,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        """`status`: the rank's first. From now on two signals make this process write its stacks."""
        self._files = StatusFiles(run_dir)
        self._clock, self._sleep = clock, sleep
        self._durations: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_HISTORY))
        path = self._files.stacks_of(status.rank)
        self._stacks = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w")
        faulthandler.register(STACK_SIGNAL, file=self._stacks, all_threads=False)
        faulthandler.register(ALL_STACKS_SIGNAL, file=self._stacks, all_threads=True)
        if not faulthandler.is_enabled():
            faulthandler.enable()  # a segmentation fault writes where it was
        self._status = replace(status, phase_at=time.time())
        self._phase_began = clock()
        self._is_open = self._has_disk = True
        self._write()
        atexit.register(self.close, "ended")  # an exit without `close` is not a crash

    def enter(self, phase: str, step: int) -> None:
        """The rank enters a phase."""
        now = self._clock()
        old = self._status
        self._durations[old.phase].append(now - self._phase_began)
        self._phase_began = now
        limit = phase_limit(self._durations[phase])
        progress: dict[str, Any] = {"state": "", "running": 0, "queued": 0, "longest": 0, "left": 0.0}
        self._status = replace(old, phase=phase, step=step, phase_at=time.time(), limit_seconds=limit, **progress)
        self._write()

    def report(
        self, *, state: str = "", running: int = 0, queued: int = 0, longest: int = 0, left: float = 0.0
    ) -> None:
        """A sign of life within a phase, with fields of `RankStatus`."""
        if state == self._status.state and self._clock() - self._wrote < self._status.heartbeat_s:
            return
        self._status = replace(self._status, state=state, running=running, queued=queued, longest=longest, left=left)
        self._write()

    def close(self, outcome: RankOutcome, detail: str = "", at_fault: Sequence[int] = ()) -> None:
        """The rank ends; a second call does nothing.

        After "timeout" the job hangs on the ranks `at_fault`: this process is killed when all stacks are written.
        A process that ends without this call, and not through Python's exit, is taken for killed.
        """
        if not self._is_open:
            return
        atexit.unregister(self.close)
        self._status = replace(self._status, outcome="failed" if outcome == "timeout" else outcome, detail=detail)
        self._write()
        self._is_open = False
        if outcome in ("failed", "timeout"):
            self._end_job(outcome, detail, list(at_fault))
        for number in (STACK_SIGNAL, ALL_STACKS_SIGNAL):
            faulthandler.unregister(number)
        self._stacks.close()

    def _end_job(self, outcome: RankOutcome, detail: str, at_fault: list[int]) -> None:
        self._sleep(_DEATH_S)
        reason, ranks = ("hung", at_fault) if outcome == "timeout" else ("failed", [self._status.rank])
        end = JobEnd(self._status.start, reason, detail, ranks, time.time())
        with suppress(OSError):  # this process's own messages name the reason, too
            self._files.claim_end(end)
        known = self._files.read_end(end.start)
        if known is not None and known.outcome == "hung":
            if known == end:
                print(f"megatron-tlt: all ranks write their stacks to {self._files.stacks}", file=sys.stderr)
            self._sleep(_KILLED_S)

    def _write(self) -> None:
        """Unless the job ends: a stopped rank goes on for a moment, and its file keeps what it did before.

        A disk that cannot be written to ends no run: one warning.
        """
        self._wrote = self._clock()
        if not self._is_open:
            return
        try:
            if self._files.end(self._status.start).exists():
                return
            self._status = replace(self._status, written_at=time.time())
            self._files.write_rank(self._status)
        except OSError as error:
            with suppress(OSError):
                if self._has_disk and self._files.status.is_dir():  # a refused start takes its directory back
                    _log.warning("the status file cannot be written: %s", error)
            self._has_disk = False
            with suppress(OSError):  # needs no space, and is a sign of life to the watchdog
                os.utime(self._files.rank(self._status.rank))


def phase_limit(durations: Sequence[float]) -> float:
    """Seconds that a phase should not exceed, from earlier ones' seconds; 0 while there are too few.

    Medians, because one hour-long evaluation must not hide the next hang.
    """
    if len(durations) < _MIN_HISTORY:
        return 0.0
    return max(_SLOW_FACTOR * statistics.median(durations), _SLOW_MIN_S)


def start_watchdog(hang_s: float, run_dir: str | Path, world: World) -> Heartbeat:
    """This rank's heartbeat, and the watchdog of this host, started by the host's first rank. Collective."""
    if world.is_main:
        StatusFiles(run_dir).clear()
    host, pid = socket.gethostname(), os.getpid()
    start = world.broadcast_object(f"{time.time():.3f}-{pid}")
    processes = world.all_gather_object((host, pid))
    pids = {rank: number for rank, (where, number) in enumerate(processes) if where == host}
    first = min(pids)
    status = RankStatus(start, world.rank, world.size, host, pid, first=first)
    heartbeat = Heartbeat(run_dir, status)
    if world.rank == first:
        folder = str(Path(run_dir).resolve())
        launch(WatchdogOptions(folder, start, world.size, pids, hang_s))
    return heartbeat
