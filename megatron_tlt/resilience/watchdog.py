"""The watchdog process of one host: `main()`. Stdlib only, so that it starts in an instant and stays small.

A process and not a thread: it goes on when a rank is killed, stopped, or holds the GIL for ever, and takes no time from
decoding. It gets its ranks' reports from a socket and their deaths from the kernel, writes their heartbeats, and ends
the job when a rank dies or others wait for one in vain. The one of rank 0's host also warns of slow phases.

    ranks --- socket ----> watchdog --- RUN_DIR/status ---> other hosts' watchdogs, `megatron-tlt status`
          <-- signals ---           <-- end of the job ---

One epoll set holds all ranks of the host, and the kernel queues its events in the order in which they happen: even a
watchdog that wakes up late on a busy host sees which rank died first and which ones were only ended with the job.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_tlt.errors import shortened
from megatron_tlt.resilience import hang_detector as detector
from megatron_tlt.resilience.heartbeat import Heartbeat, JobEnd, StatusFiles, write_status
from megatron_tlt.resilience.processes import exit_status, is_alive, process_state, write_stacks

# Schedulers and terminals send these to every process; what they mean is up to the ranks.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
_MAX_MESSAGE = 1 << 16
_LAUNCHER_S = 10.0  # for the launcher to end the other ranks by itself
_STACKS_S = 20.0  # for the other hosts' stacks
_DEATH_S = 0.5  # between an error of a rank and the death that caused it
_OTHER_HOSTS_S = 1.0  # an error that a death on another host causes may come before its watchdog has written


@dataclass(frozen=True)
class Options:
    """Of one watchdog process."""

    run_dir: str
    start_id: str
    size: int
    heartbeat_s: float
    hang_s: float


@dataclass
class Rank:
    """A rank of this host."""

    connection: socket.socket
    beat: Heartbeat
    """As last computed or written."""
    pidfd: int = -1
    report: dict[str, Any] = field(default_factory=dict)
    """Its newest report: fields of `Heartbeat`, `phase_at` and `alive_at` in seconds of this host's monotonic clock."""


class Watchdog:
    """Watches the ranks of one host until all have ended."""

    def __init__(self, options: Options, listener: socket.socket):
        self._o, self._files, self._listener = options, StatusFiles(options.run_dir), listener
        self._poll = select.epoll()
        self._poll.register(listener.fileno(), select.EPOLLIN)
        self._ranks: dict[int, Rank] = {}
        self._end: JobEnd | None = None
        self._kill_at = float("inf")
        self._looked_at = self._awake_since = self._detected_at = time.monotonic()
        # Of other hosts' ranks: the last heartbeat's number, and when it came.
        self._remote: dict[int, tuple[int, float]] = {}
        self._warned_of = -1  # order of the newest slow phase
        self._has_disk = True

    def run(self) -> None:
        """Returns when all ranks have ended."""
        parent = os.getppid()
        while self._running() or (not self._ranks and os.getppid() == parent):
            for fd, _ in self._poll.poll(min(self._o.heartbeat_s, 1.0)):
                self._handle(fd)
            for rank in self._running():
                if rank.pidfd < 0 and not is_alive(rank.beat.pid):  # an old kernel
                    self._died(rank)
            self._look()

    def _running(self) -> list[Rank]:
        return [rank for rank in self._ranks.values() if rank.beat.is_running]

    def _handle(self, fd: int) -> None:
        if fd == self._listener.fileno():
            self._accept()
            return
        for rank in self._running():
            if fd == rank.pidfd:
                self._died(rank)
            elif fd == rank.connection.fileno():
                self._receive(rank)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.getuid():
            connection.close()
            return
        report = json.loads(connection.recv(_MAX_MESSAGE))
        o, number, pid = self._o, report.pop("rank"), report.pop("pid")
        times: dict[str, Any] = {"heartbeat_s": o.heartbeat_s, "hang_s": o.hang_s}
        beat = Heartbeat(o.start_id, number, o.size, socket.gethostname(), pid, **times)
        rank = self._ranks[beat.rank] = Rank(connection, beat, report=report)
        self._poll.register(connection.fileno(), select.EPOLLIN)
        with suppress(OSError, AttributeError):
            rank.pidfd = os.pidfd_open(beat.pid)
            self._poll.register(rank.pidfd, select.EPOLLIN)
        self._write(rank, self._now(rank))

    def _receive(self, rank: Rank) -> None:
        """A report, how the rank ends, or its death."""
        try:
            data = rank.connection.recv(_MAX_MESSAGE)
        except ConnectionError:
            data = b""
        if not data:
            self._died(rank)
            return
        if self._end is not None and self._end.outcome == "hung":
            return  # while its stacks are written, a stopped rank may go on for a moment
        report = json.loads(data)
        if "outcome" not in report:
            rank.report = report
            return
        outcome, detail = report["outcome"], report["detail"]
        if outcome == "timeout":
            self._end_hung_job(detector.furthest_behind(self._all(time.monotonic())), detail)
            return
        if outcome == "failed":
            self._wait_for_deaths(rank)
            self._claim("failed", detail, [rank.beat])
        self._ended(rank, outcome if outcome in ("done", "saved") else "ended", detail)

    # -- heartbeats ---------------------------------------------------------------------------------------------

    def _now(self, rank: Rank) -> Heartbeat:
        """The rank as it is."""
        now, report = time.monotonic(), dict(rank.report)
        phase_at, alive_at, limit = report.pop("phase_at"), report.pop("alive_at"), report.pop("limit", 0.0)
        return replace(
            rank.beat,
            **report,
            process=process_state(rank.beat.pid),
            phase_seconds=round(now - phase_at, 3),
            silent_seconds=round(now - max(alive_at, self._awake_since), 3),
            limit_seconds=round(limit, 3),
            written_at=time.time(),
        )

    def _write(self, rank: Rank, beat: Heartbeat) -> None:
        """Writes a heartbeat. A full disk ends no job: one warning."""
        rank.beat = replace(beat, seq=rank.beat.seq + 1, written_at=time.time())
        try:
            write_status(self._files.heartbeat(beat.rank), rank.beat)
        except OSError as error:
            if self._has_disk:
                _warn(beat, f"heartbeats cannot be written: {error}")
            self._has_disk = False

    def _ended(self, rank: Rank, outcome: str, detail: str = "") -> None:
        """Writes a rank's last heartbeat and closes its connection. A rank at fault has the job's outcome."""
        if self._end is not None and rank.beat.rank in self._end.ranks:
            outcome = self._end.outcome
        self._write(
            rank, replace(rank.beat if self._end else self._now(rank), outcome=outcome, detail=detail)
        )
        rank.connection.close()  # also unregisters it
        if rank.pidfd >= 0:
            os.close(rank.pidfd)

    def _look(self) -> None:
        """Once a heartbeat: writes, reads what other hosts have written, looks for hangs."""
        now = time.monotonic()
        if now >= self._kill_at:
            for rank in self._running():
                with suppress(ProcessLookupError):
                    os.kill(rank.beat.pid, signal.SIGKILL)
        if now - self._looked_at < 0.9 * self._o.heartbeat_s or not self._running():
            return
        if now - self._looked_at > 5 * self._o.heartbeat_s + 10:  # stopped, and so were the ranks
            self._awake_since = now
            self._remote.clear()
        self._looked_at = now
        if self._end is None:
            for rank in self._running():
                self._write(rank, self._now(rank))
            if (end := self._files.read_end(self._o.start_id)) is not None:
                self._end_job(end)
            else:
                self._detect(now)

    # -- detection ----------------------------------------------------------------------------------------------

    def _all(self, now: float) -> list[Heartbeat]:
        """All ranks' heartbeats; those of other hosts aged by when they were seen to change."""
        beats = self._files.read_heartbeats(self._o.start_id)[0]
        for number, beat in beats.items():
            seq, since = self._remote.get(number, (-1, now))
            if seq != beat.seq:
                since = now
                self._remote[number] = beat.seq, now
            beats[number] = detector.aged(beat, now - since)
        own = {n: self._now(rank) if rank.beat.is_running else rank.beat for n, rank in self._ranks.items()}
        return list((beats | own).values())

    def _detect(self, now: float) -> None:
        """Looks for hanging and slow ranks where there is reason to: reading all files takes time in a large job."""
        o = self._o
        is_silent = any(2 * rank.beat.silent_seconds > o.hang_s > 0 for rank in self._running())
        if not (0 in self._ranks or is_silent) or now - self._detected_at < 0.02 * o.size:
            return
        self._detected_at = now
        beats = self._all(now)
        if 0 in self._ranks:
            self._warn_of_slow(detector.find_slow(beats))
        if o.hang_s and (hung := detector.find_hung(beats, o.hang_s)):
            self._end_hung_job(
                hung, f"the job hangs: {detector.describe(hung)}; waited {o.hang_s:g} s (watchdog.hang_s)"
            )

    def _warn_of_slow(self, slow: list[Heartbeat]) -> None:
        """Once a phase."""
        if not slow or slow[0].order == self._warned_of:
            return
        self._warned_of = slow[0].order
        names = shortened([f"{detector.name_of(b)} for {b.phase_seconds:.0f} s" for b in slow], 16)
        expected = f"from earlier ones at most {slow[0].limit_seconds:.0f} s were expected"
        _warn(self._ranks[0].beat, f"slow: {detector.phase_of(slow[0])}: {names}; {expected}")

    # -- the end ------------------------------------------------------------------------------------------------

    def _claim(self, outcome: str, text: str, at_fault: list[Heartbeat]) -> bool:
        """Writes why the job ends, unless that is known. From here on heartbeats stay as they are."""
        if self._end is None and len(self._ranks) < self._o.size:
            time.sleep(_OTHER_HOSTS_S)
        if self._end is not None:
            return False
        end = JobEnd(self._o.start_id, outcome, text, [beat.rank for beat in at_fault])
        is_first = True
        try:
            is_first = write_status(self._files.end, end, only_first=True)
        except OSError as error:
            _warn(at_fault[0], f"the end of the job cannot be written for other hosts: {error}")
        self._end = end if is_first else self._files.read_end(self._o.start_id) or end
        self._kill_at = time.monotonic() + _LAUNCHER_S
        return is_first

    def _died(self, rank: Rank) -> None:
        """Names the rank, unless it ended with the others."""
        with suppress(OSError):  # its death may be heard of before what it sent last
            while data := rank.connection.recv(_MAX_MESSAGE, socket.MSG_DONTWAIT):
                if "outcome" not in (report := json.loads(data)):
                    rank.report = report
        end = time.monotonic() + 1.0  # a process closes its files before the kernel knows how it ended
        while is_alive(rank.beat.pid) and time.monotonic() < end:
            time.sleep(0.005)
        how = exit_status(rank.beat.pid) or "died without an error message (killed?)"
        beat = rank.beat if self._end else self._now(rank)
        text = f"{detector.name_of(beat)} {how}, in {detector.phase_of(beat)}"
        if self._claim("killed", text, [beat]):
            _print(f"megatron-tlt: {text}; last sign of life {beat.silent_seconds:.1f} s before")
        rank.beat = beat
        self._ended(rank, "ended", how)

    def _wait_for_deaths(self, failed: Rank) -> None:
        """Handles deaths that may have caused the error of a rank. The error can arrive first: a killed process closes
        its connections to other ranks before the kernel reports its end.
        """
        others = {rank.pidfd: rank for rank in self._running() if rank is not failed and rank.pidfd >= 0}
        poll = select.poll()
        for pidfd in others:
            poll.register(pidfd, select.POLLIN)
        for pidfd, _ in poll.poll(1000 * _DEATH_S) if others and self._end is None else ():
            self._died(others[pidfd])

    def _end_job(self, end: JobEnd) -> None:
        """The job ends for a reason found on another host."""
        self._end = end
        if end.outcome == "hung":
            self._write_stacks(end.text)
        # Launchers mostly do it; of a job that hangs, the author does when all stacks are there.
        self._kill_at = time.monotonic() + _LAUNCHER_S + (_STACKS_S if end.outcome == "hung" else 0)

    def _end_hung_job(self, hung: list[Heartbeat], text: str) -> None:
        """Gathers the stacks of all ranks, then kills this host's."""
        for rank in self._running():
            rank.beat = self._now(rank)
        if not self._claim("hung", text, hung):
            return
        self._write_stacks(text)
        end = time.monotonic() + max(_STACKS_S, 3 * self._o.heartbeat_s)
        while (missing := self._without_stacks()) and time.monotonic() < end:
            time.sleep(0.1)
        size, which = self._o.size, f"{self._o.size - len(missing)} of" if missing else "all"
        lacking = f"; none came from rank {shortened(missing)}" if missing else ""
        _print(
            f"megatron-tlt: {text}; the stacks of {which} {size} ranks are in {self._files.stacks}{lacking}"
        )
        self._kill_at = time.monotonic()

    def _write_stacks(self, reason: str) -> None:
        """Has the ranks write the stacks of all their threads: the job ends."""
        ranks = {r.beat.pid: r for r in self._running()}
        clock = time.strftime("%Y-%m-%d %H:%M:%S")
        headings = {pid: f"{clock} {detector.describe([r.beat])}; {reason}" for pid, r in ranks.items()}
        files = {pid: self._files.stacks_of(r.beat.rank) for pid, r in ranks.items()}
        try:
            done = write_stacks(files, headings)
        except OSError as error:
            _print(f"megatron-tlt: stacks cannot be written: {error}")
            return
        for pid in done:
            self._write(ranks[pid], replace(ranks[pid].beat, stacks=True))

    def _without_stacks(self) -> list[int]:
        beats, _ = self._files.read_heartbeats(self._o.start_id)
        done = {number for number, beat in beats.items() if beat.stacks or not beat.is_running}
        return [number for number in range(self._o.size) if number not in done]


def _warn(beat: Heartbeat, text: str) -> None:
    """One line in the format of the ranks' log."""
    _print(
        f"{time.strftime('%H:%M:%S')} rank {beat.rank}/{beat.size} step {beat.step} {beat.phase} | WARNING {text}"
    )


def _print(text: str) -> None:
    with suppress(OSError):  # nothing reads stderr any more
        os.write(2, f"{text}\n".encode())


def main() -> None:
    """argv: the options as JSON. Its standard input is the listening socket."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        Path("/proc/self/comm").write_text("tlt-watchdog")  # for ps and top
    Watchdog(Options(**json.loads(sys.argv[1])), socket.socket(fileno=0)).run()
