"""The watchdog process of one rank: `main(options)`. Stdlib only, so that it starts in an instant and stays small.

A process and not a thread: it goes on when the rank is killed, stopped, or holds the GIL for ever, and takes no time
from its decoding. It reads the rank's block (`block.py`), writes its beat, obeys verdicts and requests of others, and
passes a verdict of its own when its rank dies without a word or others wait for it in vain. Rank 0's also watches the
others' beats and warns of slow phases.

    rank --- memory ---> watchdog --- RUN_DIR/status ---> other watchdogs, `megatron-tlt status`
         <-- SIGQUIT ---           <--- verdict, ask ----
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_tlt.errors import shortened
from megatron_tlt.resilience import hang_detector as judge
from megatron_tlt.resilience import status_files as files
from megatron_tlt.resilience.deaths import Deaths
from megatron_tlt.resilience.heartbeat import Block
from megatron_tlt.resilience.processes import ask_for_stacks, exit_status, oom_kills, process_state

# Schedulers and terminals send these to everything they find; the rank decides what they mean, not its watchdog.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
_LAUNCHER_GRACE_S = 10.0
_STACKS_S = 20.0
_SECOND_S, _AFTER_A_DEATH_S, _POLITE_S = 0.1, 1.0, 3.0
_UNKNOWN = "died without a word (killed?)"


@dataclass(frozen=True)
class Options:
    """What the rank tells its watchdog at the start (JSON, its only argument)."""

    run_dir: str
    attempt: str
    rank: int
    size: int
    pid: int
    block_fd: int
    heartbeat_s: float
    hang_s: float


class Sidecar:
    """Watches one rank until it ends."""

    def __init__(self, options: Options, said_by_rank: int = 0):
        self.o = options
        self._block = Block(options.block_fd)
        self._voice = said_by_rank
        self._beat = files.Beat(
            attempt=options.attempt,
            rank=options.rank,
            size=options.size,
            host=socket.gethostname(),
            pid=options.pid,
            seq=0,
            heartbeat_s=options.heartbeat_s,
            hang_s=options.hang_s,
        )
        self._deaths = Deaths(options.run_dir)
        self._tracker = judge.Tracker()
        self._awake_since = self._looked_at = self._scanned_at = time.monotonic()
        self._warned: dict[int, float] = {}
        self._warned_disk = False
        self._oom = oom_kills()
        self._said = b""

    # -- the loop -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Returns when the rank has ended, one way or another."""
        poller = select.poll()
        poller.register(self._voice, select.POLLIN | select.POLLHUP)
        with suppress(OSError, AttributeError):
            poller.register(os.pidfd_open(self.o.pid), select.POLLIN)
        self._write()
        while self._alive():
            # Without a pidfd, or with a child of the rank that holds the pipe open, its death is found by looking.
            events = dict(poller.poll(1000 * min(self.o.heartbeat_s, 1.0)))
            if self._voice in events and not self._listen():
                break
            if self._look():
                return
        self._rank_ended()

    def _alive(self) -> bool:
        return os.getppid() == self.o.pid and process_state(self.o.pid) != "Z"

    def _listen(self) -> bool:
        """Takes what the rank says; False when it has nothing more to say."""
        data = os.read(self._voice, 4096)
        self._said += data
        return bool(data) and not self._said.endswith(b"\n")

    def _look(self) -> bool:
        """One beat, if it is time; True if the job ends here."""
        now = time.monotonic()
        if now - self._looked_at < self.o.heartbeat_s * 0.9:
            return False
        if (
            now - self._looked_at > 5 * self.o.heartbeat_s + 10
        ):  # this process was stopped, so the rank was, too
            self._awake_since = now
            self._tracker.forget()
        self._looked_at = now
        self._write()
        if (verdict := files.read_verdict(self.o.run_dir, self.o.attempt)) is not None:
            self._obey(verdict, is_author=False)
            return True
        ask = files.read_ask(self.o.run_dir, self.o.attempt)
        if ask is not None and ask.id != self._beat.stacks:
            self._dump(ask.id, "asked by an operator")
        return self._judge(now)

    # -- what others see --------------------------------------------------------------------------------------------

    def _now(self) -> files.Beat:
        """The rank as it is."""
        now, s = time.monotonic(), self._block.read()
        return replace(
            self._beat,
            seq=self._beat.seq + 1,
            process=process_state(self.o.pid),
            phase=s.phase,
            step=s.step,
            order=s.order,
            state=s.state,
            phase_seconds=round(now - s.phase_at, 3) if s.phase_at else 0.0,
            silent_seconds=round(now - max(s.pulse_at, self._awake_since), 3),
            limit_seconds=round(s.limit, 3),
            running=s.running,
            queued=s.queued,
            longest=s.longest,
            left=s.left,
            written_at=time.time(),
        )

    def _write(self, beat: files.Beat | None = None, **changes: str) -> None:
        """Writes the beat, by default the rank as it is. A full disk ends no job: it is said once."""
        known = beat or self._now()
        fields = {"stacks": self._beat.stacks, **changes}
        self._beat = replace(known, seq=self._beat.seq + 1, **fields)  # type: ignore[arg-type]
        try:
            files.write_json(files.beat_path(self.o.run_dir, self.o.rank), self._beat)
        except OSError as error:
            if not self._warned_disk:
                self._warned_disk = True
                self._warn(f"its heartbeats cannot be written: {error}")

    def _warn(self, text: str) -> None:
        """One line in the manner of the rank's log."""
        b = self._beat
        clock = time.strftime("%H:%M:%S")
        say(f"{clock} rank {b.rank}/{b.size} step {b.step} {b.phase} | WARNING {text}")

    # -- verdicts -----------------------------------------------------------------------------------------------

    def _judge(self, now: float) -> bool:
        """Looks at all ranks, where there is reason to. True if the job ends here."""
        o = self.o
        has_reason = o.rank == 0 or (o.hang_s and self._beat.silent_seconds > o.hang_s / 2)
        if not has_reason or now - self._scanned_at < max(o.heartbeat_s, 0.02 * o.size):
            return False
        self._scanned_at = now
        beats = self._tracker.aged(files.read_beats(o.run_dir, o.attempt)[0], now)
        if o.rank == 0:
            self._warn_of(judge.slow(beats))
        if not o.hang_s or not (found := judge.stuck(beats, o.hang_s)):
            return False
        text = f"the job hangs: {judge.listed(found)}; waited {o.hang_s:g} s (watchdog.hang_s)"
        verdict = self._claim("hung", text, [b.rank for b in found])
        if verdict is not None:
            self._obey(verdict, is_author=True)
        return verdict is not None

    def _warn_of(self, slow: list[files.Beat]) -> None:
        """Once a phase, and again each time it has become twice as long."""
        if not slow:
            return
        worst = max(b.phase_seconds for b in slow)
        order = slow[0].order
        if worst < self._warned.get(order, 0.0):
            return
        self._warned = {order: 2 * worst}
        names = shortened([f"{judge.place(b)} for {b.phase_seconds:.0f} s" for b in slow], 16)
        self._warn(
            f"slow: {judge.where(slow[0])}: {names}; from earlier ones at most {slow[0].limit_seconds:.0f} s "
            "were expected"
        )

    def _claim(self, kind: str, text: str, ranks: list[int]) -> files.Verdict | None:
        """Passes a verdict; None if there is one."""
        verdict = files.Verdict(
            self.o.attempt,
            f"{kind}-{self.o.rank}-{time.time():.3f}",
            kind,
            self.o.rank,
            time.time(),
            text,
            ranks,
        )
        try:
            if not files.write_json(files.verdict_path(self.o.run_dir), verdict, unless_there=True):
                return None
        except OSError as error:  # still said, but the others do not hear of it
            self._warn(f"its verdict cannot be written: {error}")
        return verdict

    def _rank_ended(self) -> None:
        """The rank is dead, or has said how it ends."""
        try:
            said = json.loads(self._said) if self._said.endswith(b"\n") else None
        except json.JSONDecodeError:
            said = None
        if said is None:
            self._died()
            return
        outcome, detail = said["outcome"], said["detail"]
        if outcome in ("done", "saved", "left"):
            self._write(outcome="ended" if outcome == "left" else outcome, detail=detail)
            return
        kind, ranks = "failed", [self.o.rank]
        if outcome == "timeout":
            kind, ranks = "hung", self._behind()
        else:
            time.sleep(
                _AFTER_A_DEATH_S
            )  # a connection that broke when another rank was killed: that one comes first
        mine = self._claim(kind, detail, ranks)
        verdict = mine or files.read_verdict(self.o.run_dir, self.o.attempt)
        if verdict is not None and verdict.kind == "hung":
            self._obey(verdict, is_author=mine is not None)
            return
        self._write(outcome="ended" if mine is None else "failed", detail=detail)

    def _behind(self) -> list[int]:
        """The ranks that those wait for who wait."""
        here = [b for b in files.read_beats(self.o.run_dir, self.o.attempt)[0].values() if b.is_running]
        last = min((b.order for b in here), default=0)
        return [b.rank for b in here if b.order == last]

    def _died(self) -> None:
        """Names the rank, unless it went down with the others."""
        # At its exit a process closes its end of the pipe before the kernel knows how it ended.
        end = time.monotonic() + 1.0
        while os.getppid() == self.o.pid and process_state(self.o.pid) not in "Z?" and time.monotonic() < end:
            time.sleep(0.005)
        self._beat = self._now()
        how = exit_status(self.o.pid) or _UNKNOWN
        if oom_kills() > self._oom:
            how += "; the kernel has killed something here for want of memory"
        culprit = self._first_to_die()
        if culprit is None:
            # Nobody knows. Where all died at once the launcher has most likely ended them: the first speaks first.
            time.sleep(0.0 if self._others_live_here() else _SECOND_S)
        elif culprit.rank != self.o.rank:
            self._wait_for_a_verdict()
        beat, how_it = (
            (self._beat, how) if culprit is None or culprit.rank == self.o.rank else (culprit, _UNKNOWN)
        )
        text = f"{judge.place(beat)} {how_it}, in {judge.where(beat)}"
        verdict = self._claim("killed", text, [beat.rank])
        if verdict is not None:
            say(f"megatron-tlt: {text}; last sign of life {beat.silent_seconds:.1f} s before")
        else:
            verdict = files.read_verdict(self.o.run_dir, self.o.attempt)
        is_it = verdict is not None and verdict.kind == "killed" and self.o.rank in verdict.ranks
        self._write(outcome="killed" if is_it else "ended", detail=how)

    def _first_to_die(self) -> files.Beat | None:
        """The rank of this host that died first without a word, as it was last seen; None: not known."""
        beats, _ = files.read_beats(self.o.run_dir, self.o.attempt)
        for rank in self._deaths.ranks():
            if rank == self.o.rank:
                return self._beat
            if rank in beats and beats[rank].outcome in ("running", "killed"):
                return beats[rank]
        return None

    def _wait_for_a_verdict(self) -> None:
        """Lets the watchdog speak whose rank it is: it knows more."""
        end = time.monotonic() + _POLITE_S
        while time.monotonic() < end and files.read_verdict(self.o.run_dir, self.o.attempt) is None:
            time.sleep(0.05)

    def _others_live_here(self) -> bool:
        beats, _ = files.read_beats(self.o.run_dir, self.o.attempt)
        others = [b for b in beats.values() if b.rank != self.o.rank and b.host == self._beat.host]
        return any(b.is_running and process_state(b.pid) not in ("Z", "?") for b in others)

    # -- the end ------------------------------------------------------------------------------------------------

    def _obey(self, verdict: files.Verdict, is_author: bool) -> None:
        """Ends this rank; of a job that hangs, when all stacks are there. Launchers are left some time to do it."""
        then = self._now()  # asked for its stacks, a rank may go on for a moment
        try:
            if verdict.kind == "hung":
                self._gather_stacks(verdict, is_author)
            if not is_author:
                self._wait_for_the_end(_LAUNCHER_GRACE_S)
            self._write(then, outcome=verdict.kind if self.o.rank in verdict.ranks else "ended")
        finally:  # whatever goes wrong here, the job must not hang on
            if self._alive():
                os.kill(self.o.pid, signal.SIGKILL)

    def _gather_stacks(self, verdict: files.Verdict, is_author: bool) -> None:
        """This rank's stacks, then a while for those of the others; the author of the verdict says what came."""
        self._dump(verdict.id, verdict.text)
        end = time.monotonic() + max(_STACKS_S, 3 * self.o.heartbeat_s)
        while (missing := self._without_stacks(verdict.id)) and time.monotonic() < end:
            time.sleep(0.1)
        if is_author:
            folder = files.stacks_path(self.o.run_dir, 0).parent
            lacking = f"; none came from rank {', '.join(map(str, missing))}" if missing else ""
            which = f"{self.o.size - len(missing)} of" if missing else "all"
            said = f"the stacks of {which} {self.o.size} ranks are in {folder}{lacking}"
            say(f"megatron-tlt: {verdict.text}; {said}")

    def _wait_for_the_end(self, seconds: float) -> None:
        """Waits until the rank dies or, having said how it ends, waits for this process."""
        end = time.monotonic() + seconds
        poller = select.poll()
        poller.register(self._voice, select.POLLIN | select.POLLHUP)
        while self._alive() and time.monotonic() < end and (not poller.poll(50) or self._listen()):
            pass

    def _dump(self, request: str, why: str) -> None:
        """Has the rank write its stacks, and notes that it did."""
        b = self._now()
        heading = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {judge.listed([b])}; {why}"
        path = files.stacks_path(self.o.run_dir, self.o.rank)
        try:
            if ask_for_stacks(self.o.pid, path, heading, self._alive):
                self._write(stacks=request)
        except OSError as error:
            self._warn(f"its stacks cannot be written: {error}")

    def _without_stacks(self, request: str) -> list[int]:
        """Ranks that have not answered a request."""
        beats, _ = files.read_beats(self.o.run_dir, self.o.attempt)
        there = [r for r, b in beats.items() if b.stacks == request or not b.is_running]
        return [r for r in range(self.o.size) if r not in there]


def say(text: str) -> None:
    """A line on the rank's stderr, if anybody still listens."""
    with suppress(OSError):
        os.write(2, f"{text}\n".encode())


def main() -> None:
    """argv: the options as JSON. Its standard input is the rank's voice."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        Path("/proc/self/comm").write_text("tlt-watchdog")  # for ps and top
    Sidecar(Options(**json.loads(sys.argv[1]))).run()
