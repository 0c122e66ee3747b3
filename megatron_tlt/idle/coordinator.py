"""Coordination of idle ranks over MPI: which ranks are done, how long the rest will take, when the window is over.

    group leader of each replica                                rank 0: the status board
      | -- REPORT: transitions, 20 % changes ----------------------> |
      | <--------- EXPECTED_WAIT: until the slowest one is done ---- |   to idle ranks
      | <--------- LAST_BUSY: all others are done ------------------ |   to one rank
      | -- ALL_DONE: to all ranks, from the last one when it is done |
      | -- REQUEST_WORK, ASSIGN, TRANSFER, NO_WORK                   |   (`idle.work_stealing`)
    every rank: Ibarrier, entered without a request left, tested between micro-steps

Who waits for whom: no call waits for another rank but the constructor and `close`. A rank leaves the window when its
barrier tests complete, which needs no leader: every rank waits for the slowest, polling. All messages are advice: late
or lost they cost time, and no rank can hang for want of them (with work stealing, a thief polls for its answer).

Why ALL_DONE beside the barrier: a non-blocking barrier goes through log2(ranks) rounds, and a rank that trains takes
part in one round a micro-step (measured with 8 ranks: up to three micro-steps after the last one has entered). With
ALL_DONE every rank stops after the micro-step it is in, and the remaining rounds go at the pace of `test_done`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_tlt.config.idle import IdleSection
from megatron_tlt.errors import CoordinatorError
from megatron_tlt.idle.board import StatusBoard
from megatron_tlt.idle.mailbox import Mailbox
from megatron_tlt.idle.messages import Kind, Message, Report, RequestRange, unpack
from megatron_tlt.idle.policy import has_changed
from megatron_tlt.idle.state import MonotonicClock, RankState, check_transition
from megatron_tlt.idle.work_stealing import RequestQueue, WorkStealing
from megatron_tlt.observe.clock import wall_seconds

if TYPE_CHECKING:
    from mpi4py import MPI

    from megatron_tlt.interfaces import Clock

_CHANGE = 0.2  # share by which a figure must move to be sent again
_ADVICE_EVERY_S = 0.05  # between two computations of the expected wait without a new report
_SMALL_WAIT_S = 0.1  # below these, a change counts as a share of them
_SMALL_TOKENS = 16.0
_CLOSE_S = 2.0  # for messages that are under way when the coordinator is closed


class IdleCoordinator:
    """One rank's part, on a communicator of its own. Not thread-safe; no thread of its own.

    `group_size` consecutive ranks are one replica: the first one, its leader, reports; all of them enter the barrier.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        section: IdleSection | None = None,
        *,
        group_size: int = 1,
        queue: RequestQueue | None = None,
        clock: Clock | None = None,
        wall: Callable[[], float] = wall_seconds,
    ):
        """Duplicates `comm`. Collective. With `queue`, queued requests may be stolen from and by this replica.

        Raises CoordinatorError if `group_size` does not divide the number of ranks.
        """
        if group_size < 1 or comm.size % group_size:
            raise CoordinatorError(f"group_size = {group_size} must divide the number of ranks ({comm.size})")
        self._comm = comm.Dup()
        self._mailbox = Mailbox(self._comm)
        self.rank, self.size = comm.rank, comm.size
        self._section = section or IdleSection()
        self._poll_seconds = self._section.poll_ms / 1e3
        self._clock, self._wall = clock or MonotonicClock(), wall
        self._is_group_leader = comm.rank % group_size == 0
        leaders = range(0, comm.size, group_size)
        self._board = StatusBoard(leaders, self._clock) if comm.rank == 0 else None
        self._stealing = None if queue is None else WorkStealing(leaders, self._send, queue)
        self._early: list[Message] = []  # about work stealing in the next window
        self._me = Report(comm.rank, 0, 0, RankState.BUSY)
        self._polled_at = self._advised_at = self._clock.now()
        self._advised: dict[int, float] = {}  # by rank: the end of the wait that it was sent in this window
        self._wait_end: float | None = None
        self._barrier: MPI.Request | None = None
        self._is_complete = True
        self._is_over = self._has_hinted = self._has_new_reports = self._has_unsent_report = False
        self._last_busy_epoch = 0  # the newest window in which this rank was named as the last busy one
        self.entered_at = 0.0
        self.last_done_at: float | None = None

    @property
    def epoch(self) -> int:
        """The window's number, from 1."""
        return self._me.epoch

    @property
    def state(self) -> RankState:
        """This rank's state."""
        return self._me.state

    @property
    def outstanding(self) -> int:
        """MPI requests under way, the barrier among them."""
        return self._mailbox.outstanding + (self._barrier is not None)

    @property
    def is_over(self) -> bool:
        """Whether every rank is known to be done: training stops. Leaving needs `test_done`."""
        return self._is_complete or self._is_over

    def begin(self) -> None:
        """Opens the next window, BUSY. Raises CoordinatorError while the last one is open."""
        if not self._is_complete:
            raise CoordinatorError(f"window {self.epoch} is open: test_done has not been true yet")
        self._advised.clear()
        self._wait_end = self.last_done_at = None
        self._is_complete = self._is_over = self._has_hinted = False
        now, queued = self._wall(), 0 if self._stealing is None else -1
        self._me = Report(
            self.rank, self._me.seq, self.epoch + 1, RankState.BUSY, changed_at=now, queued=queued
        )
        if self._stealing is not None:
            self._stealing.begin()
        if self._board is not None:
            self._board.begin(self.epoch)
        self._report()
        early, self._early = self._early, []
        for message in early:
            self._handle(message)

    def progress(self, tokens_left: float, tokens_per_second: float) -> None:
        """While BUSY: what is still expected of this replica. Microseconds.

        Reported when it moved by a fifth. Outside a window (during an evaluation) it does nothing.
        """
        if self._is_complete:
            return
        old, share = self._me, _CHANGE
        queued = 0 if self._stealing is None else self._stealing.queued
        if (
            has_changed(old.tokens_left, tokens_left, share, _SMALL_TOKENS)
            or has_changed(old.tokens_per_second, tokens_per_second, share, 1.0)
            or has_changed(old.queued, queued, share, 1.0)
        ):
            self._me = replace(
                old, queued=queued, tokens_left=tokens_left, tokens_per_second=tokens_per_second
            )
            self._report()
        self.poll()

    def enter_done(self) -> None:
        """This replica has no request left: enters the done barrier, IDLE. Returns at once."""
        if self._barrier is not None or self._is_complete:
            raise CoordinatorError(f"enter_done in window {self.epoch} needs one begin before it")
        self.entered_at = self._wall()  # before the barrier: no rank can leave before the last one's
        self._barrier = self._comm.Ibarrier()
        self._me = replace(self._me, tokens_left=0.0, queued=0, is_requesting=False)
        if self.state is RankState.IDLE:  # since `request_work`
            self._me = replace(self._me, changed_at=self.entered_at)
            self._report()
        else:
            self.set_state(RankState.IDLE)
        self.poll(force=True)
        if self._last_busy_epoch == self.epoch:
            self._announce(self.entered_at)

    def request_work(self) -> None:
        """This replica has no request left, IDLE, and could answer those of others. Returns at once."""
        assert self._stealing is not None, "work stealing is off"
        self._me = replace(self._me, tokens_left=0.0, queued=0, is_requesting=True)
        self.set_state(RankState.IDLE)
        self.poll(force=True)  # NO_WORK may be there already
        self._stealing.request(self._me.seq)
        self.poll(force=True)

    def receive_work(self) -> Sequence[RequestRange] | None:
        """Polls; returns transferred requests, this rank being BUSY again, an empty sequence when no replica has a
        queue any more, or None: no answer yet.
        """
        assert self._stealing is not None, "work stealing is off"
        self.poll()
        if ranges := self._stealing.take_received():
            self._me = replace(self._me, is_requesting=False, queued=-1)
            self.set_state(RankState.BUSY)
            return ranges
        return () if self._stealing.is_settled else None

    def set_state(self, state: RankState) -> None:
        """A transition of this rank, reported at once. Raises CoordinatorError if it is not in the table."""
        check_transition(self._me.state, state)
        self._me = replace(self._me, state=state, changed_at=self._wall())
        self._report()

    def test_done(self) -> bool:
        """Polls, then tests the barrier: True when every rank has entered, and this one may leave."""
        if self._barrier is None and not self._is_complete:
            raise CoordinatorError(f"test_done in window {self.epoch} needs enter_done before it")
        self.poll()
        if self._barrier is not None and self._barrier.Test():
            self._barrier, self._is_complete = None, True
        return self._is_complete

    def expected_wait(self) -> float | None:
        """Seconds until the slowest replica is expected to be done; negative: overdue; None: not known."""
        if self._board is not None:
            return self._board.expected_wait()
        return None if self._wait_end is None else self._wait_end - self._clock.now()

    def poll(self, force: bool = False) -> None:
        """Handles messages that have come, sends those that are due.

        About a microsecond within `poll_ms` of the last call, ten where no message has come.
        """
        now = self._clock.now()
        if not force and now - self._polled_at < self._poll_seconds:
            return
        self._polled_at = now
        for data in self._mailbox.drain():
            self._handle(unpack(data))
        self._send_report()
        if self._board is not None and not self.is_over:
            self._lead(now, self._board)

    def close(self) -> None:
        """Frees the communicator. Collective, outside a window. Gives up on messages after two seconds."""
        if self._barrier is not None:
            return  # the job ends in the middle of a window, by MPI_Abort
        deadline = self._clock.now() + _CLOSE_S
        list(self._mailbox.drain())
        while self._mailbox.outstanding and self._clock.now() < deadline:
            time.sleep(self._poll_seconds)
            list(self._mailbox.drain())
        if not self._mailbox.outstanding:
            self._comm.Free()

    # -- messages -------------------------------------------------------------------------------------------

    def _send(self, to: int, kind: Kind, value: float = 0.0, ranges: Sequence[RequestRange] = ()) -> None:
        """A message of this rank to itself is handled at once."""
        message = Message(kind, self.rank, self.epoch, value, tuple(ranges))
        if to == self.rank:
            self._handle(message)
        else:
            self._mailbox.send(to, message.pack())

    def _report(self) -> None:
        if not self._is_group_leader:
            return
        self._me = replace(self._me, seq=self._me.seq + 1)
        if self._board is not None:
            self._board.update(self._me)
        else:
            self._has_unsent_report = True
            self._send_report()

    def _send_report(self) -> None:
        """Sends the newest report, if it has not been sent.

        Not while an earlier message is under way: a leader that does not poll for a while then finds the newest
        report, not all of them, and no list of sends grows.
        """
        if self._has_unsent_report and not self._mailbox.is_sending:
            self._has_unsent_report = False
            message = Message(Kind.REPORT, self.rank, self.epoch, report=self._me)
            self._mailbox.send(0, message.pack())

    def _handle(self, message: Message) -> None:
        kind, epoch = message.kind, message.epoch
        if message.report is not None:
            if self._board is None:
                raise CoordinatorError(f"rank {message.sender} reported to rank {self.rank}, which has no board")
            self._board.update(message.report)
            self._has_new_reports = True
        elif kind is Kind.LAST_BUSY:
            self._last_busy_epoch = max(self._last_busy_epoch, epoch)
        elif epoch < self.epoch:
            return
        elif kind is Kind.ALL_DONE:
            self._is_over, self.last_done_at = True, message.value
        elif kind is Kind.EXPECTED_WAIT and epoch == self.epoch:
            self._wait_end = self._clock.now() + message.value
        elif self._stealing is not None and epoch > self.epoch:
            self._early.append(message)  # its sender has left a window that this rank is still in
        elif self._stealing is not None:
            left = self._stealing.handle(message)
            if left is not None:
                self._me = replace(self._me, queued=left)
                self._report()  # so that rank 0 may choose this victim again

    # -- on rank 0 ------------------------------------------------------------------------------------------

    def _lead(self, now: float, board: StatusBoard) -> None:
        """Sends what follows from the board: assignments, the end of the window, the last busy rank, the wait."""
        if self._stealing is not None and self._stealing.has_open_requests:
            self._stealing.assign(board)
        if not board.busy:
            self._announce(board.last_change())
            return
        if len(board.busy) == 1 and not self._has_hinted:
            self._has_hinted = True
            (last,) = board.busy
            if last:  # rank 0 itself finds it on its board
                self._send(last, Kind.LAST_BUSY)
        if self._has_new_reports or now - self._advised_at >= _ADVICE_EVERY_S:
            self._has_new_reports, self._advised_at = False, now
            self._advise(now, board)

    def _advise(self, now: float, board: StatusBoard) -> None:
        """Sends idle ranks the expected wait, once, and again when it moved by a fifth."""
        wait = board.expected_wait()
        if wait is None:
            return
        for rank in board.idle_ranks():
            end = self._advised.get(rank)
            is_new = end is None or has_changed(end - now, wait, _CHANGE, _SMALL_WAIT_S)
            if rank and is_new:
                self._advised[rank] = now + wait
                self._send(rank, Kind.EXPECTED_WAIT, wait)

    def _announce(self, last_done_at: float) -> None:
        """Sends ALL_DONE to every rank, unless this rank has sent or received it in this window."""
        if self._is_over:
            return
        self._is_over, self.last_done_at = True, last_done_at
        for other in range(self.size):
            if other != self.rank:
                self._send(other, Kind.ALL_DONE, last_done_at)
