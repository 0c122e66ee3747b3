"""The watchdog process of one host: `main()`. Stdlib only, so that it starts in an instant and stays small.

It names a rank that dies without an error message, or that shows no sign of life for `watchdog.hang_s`, and ends the
job. A process and not a thread: it goes on when a rank is killed, stopped, or holds the GIL for ever.

    ranks --- status files ---> watchdog --- end of the job (a file) ---> other hosts' watchdogs, `megatron-tlt status`
          --- pidfd ---------->          --- signals: stacks, SIGKILL ---> ranks of this host

The kernel queues the ends of processes in the order in which they happen: even a watchdog that wakes up late on a busy
host sees which rank died first, and which ones the launcher ended after it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_tlt.resilience.status_files import JobEnd, RankStatus, StatusFiles

ALL_STACKS_SIGNAL = signal.SIGRTMIN  # every thread's: it reads frames that change meanwhile, and may crash the process
# Schedulers and terminals send these to every process; the ranks handle them.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
_ENVIRONMENT = "PATH", "LD_LIBRARY_PATH", "HOME", "LANG", "TMPDIR"  # no launcher's: it is not a rank
_BOOT = "import sys; sys.path.insert(0, sys.argv[2]); from megatron_tlt.resilience.watchdog import main; main()"
_LOOK_S = 5.0  # between two looks: as often as ranks write
_LAUNCHER_S = 10.0  # for the launcher to end the other ranks by itself
_STACKS_S = 5.0  # for a rank to write its stacks
_SEEN_S = 60.0  # until all hosts see a new file: NFS clients go on without it until a directory's attributes expire
_HOSTS_SHARE = 1 / 30  # of `hang_s`, between two looks at the other hosts' files: all hosts look at all others'


@dataclass(frozen=True)
class WatchdogOptions:
    """Of one watchdog process."""

    run_dir: str
    start: str
    size: int
    pids: dict[int, int]
    """Processes of this host's ranks, by rank."""
    hang_s: float


class Watchdog:
    """Watches the ranks of one host until all have ended."""

    def __init__(self, options: WatchdogOptions, clock: Callable[[], float] = time.monotonic):
        self._options, self._clock = options, clock
        self._files = StatusFiles(options.run_dir)
        self._pids = dict(options.pids)  # of the ranks that have not ended
        # When a file changed last, nanoseconds; seconds since then, without those in which this process slept.
        self._seen: dict[Path, tuple[int, float]] = {}
        self._end: JobEnd | None = None
        self._kill_at = float("inf")
        self._looked_at = clock()
        self._since_hosts = 0.0  # seconds since the last look at the other hosts, as counted for silence
        self._poll = select.epoll()
        self._rank_of: dict[int, int] = {}  # by pidfd
        for rank, pid in options.pids.items():
            with suppress(OSError):  # a kernel before 5.3, or it has ended: `_look` finds out
                fd = os.pidfd_open(pid)
                self._rank_of[fd] = rank
                self._poll.register(fd, select.EPOLLIN)

    def run(self) -> None:
        """Returns when all ranks have ended."""
        while self._pids:
            # No later than a kill is due: a stopped rank goes on once its stack is written.
            for fd, _ in self._poll.poll(min(_LOOK_S, max(0.05, self._kill_at - self._clock()))):
                self._poll.unregister(fd)
                self._died(self._rank_of[fd])
            self._look()

    def _look(self) -> None:
        """Finds what the kernel does not report: the end of the job on another host, silent ranks and hosts."""
        now = self._clock()
        for rank in self._pids.keys() - set(self._rank_of.values()):
            if not Path(f"/proc/{self._pids[rank]}").exists():
                self._died(rank)
        if self._end is not None:
            self._kill_if_due(now)
            return
        # A suspended host, or a stopped job, was silent because it could not run.
        seconds = min(now - self._looked_at, 2 * _LOOK_S)
        self._looked_at = now
        with suppress(OSError):
            self._files.host(min(self._options.pids)).touch(mode=0o600)
        end = self._files.read_end(self._options.start)
        if end is not None:
            self._end_job(end)
        elif self._options.hang_s and (hung := [*self._hung(seconds), *self._lost(seconds)]):
            self._claim_hung(hung)

    def _hung(self, seconds: float) -> list[RankStatus]:
        """This host's ranks without a sign of life for `hang_s`; `seconds` have passed since the last call."""
        silent = {rank: self._silence(self._files.rank(rank), seconds) for rank in self._pids}
        return [self._status(rank) for rank in silent if silent[rank] >= self._options.hang_s]

    def _lost(self, seconds: float) -> list[RankStatus]:
        """The running ranks of hosts whose watchdogs have written nothing for `hang_s`, as without power.

        `seconds` have passed since the last call.
        """
        self._since_hosts += seconds
        if self._since_hosts < _HOSTS_SHARE * self._options.hang_s:
            return []
        seconds, self._since_hosts = self._since_hosts, 0.0
        others = set(self._files.status.glob("host-*")) - {self._files.host(min(self._options.pids))}
        silent = {path for path in others if self._silence(path, seconds) >= self._options.hang_s}
        return [status for path in silent for status in self._ranks_of(path)]

    def _ranks_of(self, host: Path) -> list[RankStatus]:
        """The running ranks of a host; none where one has written since its watchdog has, which has ended alone."""
        with suppress(OSError):
            ranks = [status for status in self._files.read_ranks()[0].values() if status.start == self._options.start]
            running = [s for s in ranks if s.outcome == "running" and self._files.host(s.first) == host]
            last = host.stat().st_mtime + 2 * _LOOK_S
            if all(self._files.rank(status.rank).stat().st_mtime < last for status in running):
                return running
        return []

    def _silence(self, path: Path, seconds: float) -> float:
        """Seconds since a file changed, of this process's own clock; `seconds` have passed since the last call."""
        before, silent = self._seen.get(path, (0, 0.0))
        with suppress(OSError):
            written = path.stat().st_mtime_ns
            silent = silent + seconds if written == before else 0.0
            self._seen[path] = written, silent
        return silent

    def _died(self, rank: int) -> None:
        """Names a rank that has ended, if its status file does not say why and the job was not ending."""
        if self._pids.pop(rank, None) is None:  # taken back
            return
        with suppress(OSError):  # a file system that does not answer has not lost the directory
            if not self._files.status.is_dir():  # moved
                return
        status = self._status(rank)
        if self._end is None and status.outcome == "running":
            seconds = time.time() - status.written_at
            text = (
                f"{status.name} ended without an error message (killed? out of memory? a second Ctrl-C?), in "
                f"{status.where}; last sign of life {seconds:.1f} s before"
            )
            self._claim("killed", text, [rank])

    def _claim_hung(self, found: list[RankStatus]) -> None:
        names = "; ".join(f"{status.name} in {status.where}" for status in found[:16])
        seconds = f"{self._options.hang_s:g} s (watchdog.hang_s)"
        text = f"the job hangs: {names}, without a sign of life for {seconds}; all stacks are in {self._files.stacks}"
        self._claim("hung", text, [status.rank for status in found])

    def _claim(self, outcome: str, text: str, ranks: list[int]) -> None:
        """Writes and prints the reason for the end of the job, unless another process has. Ends the job."""
        end = JobEnd(self._options.start, outcome, text, ranks, time.time())
        try:
            is_first = self._files.claim_end(end)
        except OSError as error:
            is_first = True
            _print(f"megatron-tlt: the end of the job cannot be written for other hosts: {error}")
        self._end_job(end if is_first else self._files.read_end(end.start) or end)
        if is_first:
            _print(f"megatron-tlt: {text}")

    def _end_job(self, end: JobEnd) -> None:
        """From now on deaths are those of a job that ends."""
        self._end = end
        delay = _LAUNCHER_S
        if end.outcome == "hung":
            self._write_stacks()
            # The launcher ends all ranks with the first one: other hosts' must have written their stacks by then.
            is_alone = len(self._options.pids) == self._options.size
            delay = 0.0 if is_alone else _SEEN_S + 2 * _LOOK_S + _STACKS_S
        self._kill_at = self._clock() + delay

    def _kill_if_due(self, now: float) -> None:
        for pid in self._pids.values() if now >= self._kill_at else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _write_stacks(self) -> None:
        """Has this host's ranks append the stacks of all their threads to their files; returns when they are there.

        They have registered the signal with `faulthandler`: its handler is C and needs no GIL, so it works in a process
        that computes in C or waits inside MPI. SIGCONT lets a stopped process handle it, too.
        """
        sizes: dict[Path, int] = {}
        for rank, pid in self._pids.items():
            path = self._files.stacks_of(rank)
            status = self._status(rank)
            heading = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {status.name} in {status.where}"
            try:
                with path.open("a", encoding="utf-8") as file:
                    file.write(f"\n==== {heading}\n")
                sizes[path] = path.stat().st_size
                os.kill(pid, ALL_STACKS_SIGNAL)
                os.kill(pid, signal.SIGCONT)
            except OSError as error:
                _print(f"megatron-tlt: no stacks of rank {rank}: {error}")
        seen: dict[Path, int] = {}
        end = self._clock() + _STACKS_S
        while self._clock() < end:
            time.sleep(0.2)
            with suppress(OSError):
                before, seen = seen, {path: path.stat().st_size for path in sizes}
                if seen == before and all(seen[path] > sizes[path] for path in sizes):
                    break

    def _status(self, rank: int) -> RankStatus:
        with suppress(OSError, ValueError, TypeError):
            status = self._files.read_rank(rank)
            if status is not None and status.start == self._options.start:
                return status
        options = self._options
        return RankStatus(options.start, rank, options.size, "?", options.pids[rank], written_at=time.time())


def _print(text: str) -> None:
    with suppress(OSError):  # nothing reads stderr any more
        os.write(2, f"{text}\n".encode())


def launch(options: WatchdogOptions) -> None:
    """Starts a watchdog process."""
    root = str(Path(__file__).resolve().parents[2])
    subprocess.Popen(
        # Without site and its packages: it needs none, and starts four times as fast.
        [sys.executable, "-I", "-S", "-c", _BOOT, json.dumps(asdict(options)), root],
        stdin=subprocess.DEVNULL,
        stdout=2,
        env={name: value for name, value in os.environ.items() if name in _ENVIRONMENT},
        start_new_session=True,  # launchers kill by process group, and it must outlive its ranks for a moment
    )


def main() -> None:
    """argv: the options as JSON."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        Path("/proc/self/comm").write_text("tlt-watchdog")  # for ps and top
    tree = json.loads(sys.argv[1])
    pids = {int(rank): pid for rank, pid in tree.pop("pids").items()}
    Watchdog(WatchdogOptions(**tree, pids=pids)).run()
