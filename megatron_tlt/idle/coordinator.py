"""Idle ranks over MPI: everybody may know who is done, and nobody ever waits inside MPI.

    rank            reports up: transitions, 20 % changes        rank 0: the status board
      |  REPORT --------------------------------------------------->  |
      |  <-------- TAIL: how long the slowest one is expected to take |   (to idle ranks)
      |  <-------- LAST: you are the one that is waited for           |   (to one rank)
      |  OVER: to everybody, from the last one when it is done        |
      |  ASK, GRANT, GIVE, DRY: queued requests go to dry replicas    |   (`idle.takeover`)
      |  Ibarrier: entered when dry, tested between micro-steps; alone decides that the window is over

Above `sub_leaders_above` ranks reports go through the first rank of each node, which sends on what is new in one
message; TAIL comes back the same way. The barrier needs no leader. Board, TAIL, LAST and OVER are advice: late or
lost they cost time, and nothing can hang or go wrong for want of them.

Why OVER, when the barrier tells the same: a non-blocking barrier goes through log2(ranks) rounds, and a rank that
trains takes part in one round a micro-step (measured, 8 ranks: up to three micro-steps from the last one's entry).
With OVER everybody stops after the micro-step it is in, and the rounds go on at the pace of `all_done`.

Every message is a non-blocking send of at most 1.8 kB, kept until it is tested complete, or a matched probe with a
non-blocking receive. A single Iprobe makes about one message of progress: draining needs several misses in a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_tlt.errors import CoordinatorError
from megatron_tlt.idle.board import Entry, StatusBoard
from megatron_tlt.idle.messages import MAX_REPORTS, Kind, Message, Report, RequestRange, pack, unpack
from megatron_tlt.idle.policy import has_changed
from megatron_tlt.idle.post import Post
from megatron_tlt.idle.state import MonotonicClock, RankState, check_transition
from megatron_tlt.idle.work_stealing import Give, Takeover
from megatron_tlt.observe.clock import wall_seconds

if TYPE_CHECKING:
    from mpi4py import MPI

    from megatron_tlt.config.idle import IdleSection
    from megatron_tlt.interfaces import Clock

_ENTRY_TESTS = 8
_ANSWER_EVERY_S = 0.05
_SMALL_TAIL_S = 0.1
_SMALL_TOKENS = 16.0
_CLOSE_S = 2.0


class IdleCoordinator:
    """One rank's part of the coordination, on a communicator of its own. Not thread-safe; no thread of its own.

    Ranks in a row of `unit_size` are one replica: the first speaks for it, all enter the barrier.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        *,
        unit_size: int = 1,
        ranks_per_node: int = 1,
        sub_leaders_above: int = 500,
        min_poll_seconds: float = 0.002,
        report_change: float = 0.2,
        heartbeat_seconds: float = 1.0,
        give: Give | None = None,
        clock: Clock | None = None,
        wall: Callable[[], float] = wall_seconds,
    ):
        """Duplicates `comm`. Collective, the only call that may wait. Raises CoordinatorError for a wrong unit size.

        With `give` queued requests change replicas: it takes some out of this one's queue, within `progress`.
        """
        if unit_size < 1 or comm.size % unit_size:
            raise CoordinatorError(f"unit_size = {unit_size} must divide the number of ranks ({comm.size})")
        self._comm = comm.Dup()
        self._post = Post(self._comm)
        self.rank, self.size = comm.rank, comm.size
        self._clock, self._wall = clock or MonotonicClock(), wall
        self._min_poll, self._change, self._heartbeat = min_poll_seconds, report_change, heartbeat_seconds
        self._speaks = comm.rank % unit_size == 0
        speakers = range(0, comm.size, unit_size)
        first_of_node = comm.rank // ranks_per_node * ranks_per_node
        through_nodes = comm.size > sub_leaders_above
        self._parent = first_of_node if through_nodes and first_of_node != comm.rank else 0
        members = [r for r in speakers if r // ranks_per_node * ranks_per_node == first_of_node]
        has_board = comm.rank == 0 or (through_nodes and first_of_node == comm.rank)
        self._board: StatusBoard | None = None
        if has_board:
            self._board = StatusBoard(speakers if comm.rank == 0 else members, self._clock)
        self._takeover = None if give is None else Takeover(speakers, self._send_work, give)
        self._early: list[Message] = []  # of the next window
        self._outbox: dict[int, Report] = {}
        self._me = Report(comm.rank, 0, 0, RankState.BUSY)
        self._reported_at = self._polled_at = self._answered_at = self._clock.now()
        self._begun_at = self._checked_at = self._polled_at
        self._told: dict[int, float] = {}  # to whom which end of the tail was told, this window
        self._tail_end: float | None = None
        self._barrier: MPI.Request | None = None
        self._is_complete = True
        # The newest windows of which this rank heard that they are over, that it is the last, whose last it told.
        self._over_epoch = self._last_epoch = self._hinted_epoch = 0
        self._has_news = False
        self.entered_at = 0.0
        self.last_done_at: float | None = None

    @classmethod
    def of(
        cls,
        section: IdleSection,
        comm: MPI.Comm,
        unit_size: int,
        ranks_per_node: int,
        give: Give | None = None,
    ) -> IdleCoordinator:
        """A coordinator with the settings of a configuration. Collective."""
        return cls(
            comm,
            unit_size=unit_size,
            ranks_per_node=ranks_per_node,
            sub_leaders_above=section.sub_leaders_above,
            min_poll_seconds=section.poll_ms / 1e3,
            report_change=section.report_change,
            heartbeat_seconds=section.heartbeat_seconds,
            give=give,
        )

    @property
    def epoch(self) -> int:
        """The window's number, from 1."""
        return self._me.epoch

    @property
    def state(self) -> RankState:
        """What this rank said last that it does."""
        return self._me.state

    @property
    def outstanding(self) -> int:
        """MPI requests under way, the barrier among them."""
        return self._post.outstanding + (self._barrier is not None)

    @property
    def is_over(self) -> bool:
        """Whether every rank is known to be done with this window: time to stop, not yet to leave (`all_done`)."""
        return self._is_complete or self._over_epoch >= self.epoch

    def begin(self) -> None:
        """Opens the next window, BUSY. Raises CoordinatorError while the last one is open."""
        if not self._is_complete:
            raise CoordinatorError(f"window {self.epoch} is open: all_done has not been true yet")
        self._begun_at = self._clock.now()
        self._told.clear()
        self._tail_end = self.last_done_at = None
        self._is_complete = False
        queued = 0 if self._takeover is None else -1
        self._me = Report(
            self.rank, self._me.seq, self.epoch + 1, RankState.BUSY, changed_at=self._wall(), queued=queued
        )
        if self._takeover is not None:
            self._takeover.begin()
        if self._board is not None:
            self._board.begin(self.epoch)
        self._report()
        early, self._early = self._early, []
        for message in early:
            self._handle(message)

    def progress(self, running: int, tokens_left: float, tokens_per_second: float, queued: int = 0) -> None:
        """While BUSY: what is still expected of this replica, and how many of its requests another could take over.

        Reported when it moved by 20 %; microseconds. Outside a window (an evaluation rolls out, too) it does nothing.
        """
        if self._is_complete:
            return
        old = self._me
        if (
            has_changed(old.tokens_left, tokens_left, self._change, _SMALL_TOKENS)
            or has_changed(old.tokens_per_second, tokens_per_second, self._change, 1.0)
            or (running == 0) != (old.running == 0)
            or has_changed(old.queued, queued, self._change, 1.0)
        ):
            self._me = replace(
                old,
                running=running,
                tokens_left=tokens_left,
                tokens_per_second=tokens_per_second,
                queued=queued,
            )
            self._report()
        self.poll()

    def enter_done(self) -> None:
        """This replica ran dry: enters the done barrier, IDLE. Returns at once."""
        if self._barrier is not None or self._is_complete:
            raise CoordinatorError(f"enter_done in window {self.epoch} needs one begin before it")
        self.entered_at = self._wall()  # before the barrier: nobody has left before the last one's
        self._barrier = self._comm.Ibarrier()
        self._me = replace(self._me, running=0, tokens_left=0.0, queued=0, asks=False)
        if self.state is RankState.IDLE:  # since `ask_for_work`
            self._me = replace(self._me, changed_at=self.entered_at)
            self._report()
        else:
            self.tell(RankState.IDLE)
        self.poll(force=True)
        if self._last_epoch == self.epoch:
            self._announce(self.entered_at)
            return
        for _ in range(_ENTRY_TESTS):  # complete at the door: all others came before
            if self._test_barrier():
                self._announce(self.entered_at)
                return

    def ask_for_work(self) -> None:
        """This replica ran dry, IDLE, and could answer requests of others. Returns at once."""
        assert self._takeover is not None, "nobody gives anything here"
        self._me = replace(self._me, running=0, tokens_left=0.0, queued=0, asks=True)
        self.tell(RankState.IDLE)
        self.poll(force=True)  # the answer may be there already
        self._takeover.ask(self._me.seq)
        self.poll(force=True)

    def given_work(self) -> Sequence[RequestRange] | None:
        """Polls; the requests that came, this rank being BUSY again; none when there is nothing left to take anywhere;
        None: not known yet.
        """
        assert self._takeover is not None
        self.poll()
        if pieces := self._takeover.collect():
            self._me = replace(self._me, asks=False, queued=-1)
            self.tell(RankState.BUSY)
            return pieces
        return () if self._takeover.is_settled else None

    def tell(self, state: RankState, steps: int = 0) -> None:
        """A transition of this rank, reported at once. Raises CoordinatorError if it is not in the table."""
        check_transition(self._me.state, state)
        self._me = replace(self._me, state=state, steps=steps, changed_at=self._wall())
        self._report()

    def count_steps(self, steps: int) -> None:
        """Micro-steps of this window so far, for the next report; sends nothing itself."""
        self._me = replace(self._me, steps=steps)

    def all_done(self) -> bool:
        """Polls, then tests the barrier: True when every rank has entered, and this one may leave."""
        if self._barrier is None and not self._is_complete:
            raise CoordinatorError(f"all_done in window {self.epoch} needs enter_done before it")
        self.poll()
        return self._test_barrier()

    def expected_tail(self) -> float | None:
        """Seconds until the slowest replica is expected to be done; negative: overdue; None: not known."""
        if self.rank == 0 and self._board is not None:
            return self._board.tail()
        return None if self._tail_end is None else self._tail_end - self._clock.now()

    def poll(self, force: bool = False) -> None:
        """Takes what has come, sends what is due.

        About a microsecond within `min_poll_seconds` of the last call, ten where nothing has come.
        """
        now = self._clock.now()
        if not force and now - self._polled_at < self._min_poll:
            return
        self._polled_at = now
        for data in self._post.drain():
            self._handle(unpack(data))
        if self._speaks and now - self._reported_at >= self._heartbeat:
            self._report()
        self._send_reports()
        if self._board is not None:
            self._lead(now)

    def board(self) -> list[Entry]:
        """What this rank knows of the others: on rank 0 all that speak, on others less or nothing."""
        return [] if self._board is None else self._board.entries()

    def board_text(self) -> str:
        """The board in words, for error messages: who was last seen in which state, how long ago."""
        return f"rank {self.rank} keeps no board" if self._board is None else self._board.text()

    def check_alive(self, silent_seconds: float) -> None:
        """On rank 0, in a window: raises CoordinatorError, naming ranks that are silent for so long, and the board."""
        if self.rank or self._board is None:
            return
        now = self._clock.now()
        if now - self._begun_at < silent_seconds or now - self._checked_at < self._heartbeat:
            return  # nobody speaks between windows; and looking through the board takes time
        self._checked_at = now
        dead = [e for e in self._board.entries() if e.rank and e.silent_seconds > silent_seconds]
        if dead:
            names = ", ".join(str(e.rank) for e in dead)
            raise CoordinatorError(
                f"nothing was heard of rank {names} for {silent_seconds:g} s; last seen: {self.board_text()}"
            )

    def close(self) -> None:
        """Frees the communicator. Collective; call it outside a window. Gives up on messages after two seconds."""
        if self._barrier is not None:
            return  # the job is ending in the middle of a window: MPI_Abort will see to it
        deadline = self._clock.now() + _CLOSE_S
        for _ in self._post.drain():
            pass
        while self._post.outstanding and self._clock.now() < deadline:
            time.sleep(self._min_poll)
            for _ in self._post.drain():
                pass
        if not self._post.outstanding:
            self._comm.Free()

    def __enter__(self) -> IdleCoordinator:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _test_barrier(self) -> bool:
        if self._barrier is not None and self._barrier.Test():
            self._barrier, self._is_complete = None, True
        return self._is_complete

    def _report(self) -> None:
        if not self._speaks:
            return
        self._me = replace(self._me, seq=self._me.seq + 1)
        self._reported_at = self._clock.now()
        if self._board is not None:
            self._board.take(self._me, self.rank)
        if self.rank:
            self._outbox[self.rank] = self._me
            self._send_reports()

    def _send_reports(self) -> None:
        """The newest of each rank that has news, many in one message.

        Not while an earlier message is on its way: a leader that does not poll for a while finds the newest
        reports, not all of them, and nobody's list of sends grows.
        """
        if not self._outbox or self._post.is_sending:
            return
        reports = list(self._outbox.values())
        self._outbox.clear()
        for i in range(0, len(reports), MAX_REPORTS):
            some = reports[i : i + MAX_REPORTS]
            self._post.send(self._parent, pack(Kind.REPORT, self.rank, self.epoch, reports=some))

    def _handle(self, message: Message) -> None:
        kind, epoch = message.kind, message.epoch
        if kind is Kind.REPORT:
            self._take_reports(message)
        elif kind is Kind.OVER and epoch >= self.epoch:
            self._over_epoch = max(self._over_epoch, epoch)
            self.last_done_at = message.value
        elif kind is Kind.LAST:
            self._last_epoch = max(self._last_epoch, epoch)
        elif kind is Kind.TAIL and epoch == self.epoch:
            self._tail_end = self._clock.now() + message.value
        elif self._takeover is not None and epoch > self.epoch:
            self._early.append(message)  # its rank has left a window that this one is still in
        elif self._takeover is not None and epoch == self.epoch:
            left = self._takeover.handle(message)
            if left is not None:
                self._me = replace(self._me, queued=left)
                self._report()  # so that rank 0 may choose this one again

    def _send_work(self, to: int, kind: Kind, value: float = 0.0, pieces: Sequence[RequestRange] = ()) -> None:
        """A message about requests; one to itself does not travel."""
        if to == self.rank:
            self._handle(Message(kind, self.rank, self.epoch, value, pieces=tuple(pieces)))
        else:
            self._post.send(to, pack(kind, self.rank, self.epoch, value, pieces=pieces))

    def _take_reports(self, message: Message) -> None:
        if self._board is None:
            raise CoordinatorError(
                f"rank {message.sender} reported to rank {self.rank}, which keeps no board"
            )
        for report in message.reports:
            # An earlier window's is stale. A later one's is not: its rank has left a window that this one is still in.
            if report.epoch < self.epoch or not self._board.take(report, message.sender):
                continue
            self._has_news = True
            if self.rank:
                self._outbox[report.rank] = report

    def _lead(self, now: float) -> None:
        """Advice to others: that it is over, who is last, how long it will take."""
        assert self._board is not None
        if self.is_over:
            return
        if self.rank == 0:
            if self._takeover is not None and self._takeover.must_lead:
                self._takeover.lead(self._board)
            busy = self._board.busy
            if not busy:
                self._announce(self._board.last_change())
                return
            if len(busy) == 1 and self._hinted_epoch < self.epoch:
                self._hinted_epoch = self.epoch
                (last,) = busy
                if last:  # rank 0 itself sees it on the board
                    self._post.send(last, pack(Kind.LAST, 0, self.epoch))
        if self._has_news or now - self._answered_at >= _ANSWER_EVERY_S:
            self._has_news, self._answered_at = False, now
            self._answer(now)

    def _answer(self, now: float) -> None:
        """Tells idle ranks how long it will take, once, and again when that moved by 20 %."""
        assert self._board is not None
        tail = self.expected_tail()
        if tail is None:
            return
        for child in self._board.waiting_vias() - {self.rank}:
            end = self._told.get(child)
            if end is None or has_changed(end - now, tail, self._change, _SMALL_TAIL_S):
                self._told[child] = now + tail
                self._post.send(child, pack(Kind.TAIL, self.rank, self.epoch, tail))

    def _announce(self, last_done_at: float) -> None:
        """Tells everybody that every rank is done, unless somebody has."""
        if self._over_epoch >= self.epoch:
            return
        self._over_epoch = self.epoch
        self.last_done_at = last_done_at
        data = pack(Kind.OVER, self.rank, self.epoch, last_done_at)
        for other in range(self.size):
            if other != self.rank:
                self._post.send(other, data)
