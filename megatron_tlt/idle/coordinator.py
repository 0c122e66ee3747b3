"""Coordination of idle ranks over MPI: which ranks are done, and when the window is over.

    group leader of each replica                                rank 0: the status board
      | -- REPORT: transitions ------------------------------------> |
      | <--------- LAST_BUSY: all others are done ------------------ |   to one rank
      | -- ALL_DONE: to all ranks, from the last one when it is done |
      | -- REQUEST_WORK, ASSIGN, TRANSFER, NO_WORK                   |   (`idle.work_stealing`)
    every rank: Ibarrier, entered without a request left, tested between micro-steps

Who waits for whom: no call waits for another rank but the constructor and `close`. A rank leaves the window when its
barrier tests complete, which needs no leader: every rank waits for the slowest, polling. All messages are advice: late
or lost they cost time, and no rank can hang for want of them (with work stealing, a thief polls for its response).

Why ALL_DONE beside the barrier: a non-blocking barrier goes through log2(ranks) rounds, and a rank that trains takes
part in one round a micro-step (measured with 8 ranks: up to three micro-steps after the last one has entered). With
ALL_DONE every rank stops after the micro-step it is in, and the remaining rounds go at the pace of `test_done`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_tlt.config.idle import IdleSection
from megatron_tlt.idle.board import StatusBoard
from megatron_tlt.idle.mailbox import Mailbox
from megatron_tlt.idle.messages import Kind, Message, Report
from megatron_tlt.idle.state import RankState
from megatron_tlt.idle.work_stealing import RequestQueue, WorkStealing
from megatron_tlt.observe.clock import wall_seconds

if TYPE_CHECKING:
    from mpi4py import MPI

_CHANGE = 0.2  # share by which a queue must change to be reported again
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
        clock: Callable[[], float] = time.perf_counter,
        wall: Callable[[], float] = wall_seconds,
    ):
        """Duplicates `comm`. Collective. With `queue`, queued requests may be stolen from and by this replica."""
        self._comm = comm.Dup()
        self._mailbox = Mailbox(self._comm)
        self.rank, self.size = comm.rank, comm.size
        self._section = section or IdleSection()
        self._poll_seconds = self._section.poll_ms / 1e3
        self._clock, self._wall = clock, wall
        self._is_group_leader = comm.rank % group_size == 0
        leaders = range(0, comm.size, group_size)
        self._board = StatusBoard(leaders) if comm.rank == 0 else None
        self._stealing = None if queue is None else WorkStealing(leaders, self._send, queue)
        self._early: list[Message] = []  # about work stealing in the next window
        self._me = Report(comm.rank, 0, 0, RankState.BUSY)
        self._polled_at = self._clock()
        self._barrier: MPI.Request | None = None
        self._is_complete = True
        self._is_over = self._has_hinted = False
        self._last_busy_epoch = 0  # the newest window in which this rank was named as the last busy one
        self.entered_at = 0.0
        self.last_done_at: float | None = None

    @property
    def epoch(self) -> int:
        """The window's number, from 1."""
        return self._me.epoch

    @property
    def state(self) -> RankState:
        """This rank's state: BUSY or IDLE."""
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
        """Opens the next window, BUSY."""
        assert self._is_complete, "the last window is open: test_done has not been true yet"
        self.last_done_at = None
        self._is_complete = self._is_over = self._has_hinted = False
        queued = 0 if self._stealing is None else -1
        self._me = Report(self.rank, self._me.seq, self.epoch + 1, RankState.BUSY, queued=queued)
        if self._stealing is not None:
            self._stealing.begin()
        if self._board is not None:
            self._board.begin(self.epoch)
        self._report()
        early, self._early = self._early, []
        for message in early:
            self._handle(message)

    def progress(self) -> None:
        """While BUSY: polls, and reports a queue that changed by a fifth. Microseconds.

        Outside a window (during an evaluation) it does nothing.
        """
        if self._is_complete:
            return
        old, queued = self._me.queued, 0 if self._stealing is None else self._stealing.queued
        if abs(queued - old) >= _CHANGE * max(abs(old), 1):
            self._report(queued=queued)
        self.poll()

    def enter_done(self) -> None:
        """This replica has no request left: enters the done barrier, IDLE. Returns at once."""
        assert self._barrier is None and not self._is_complete, "enter_done needs one begin before it"
        self.entered_at = self._wall()  # before the barrier: no rank can leave before the last one's
        self._barrier = self._comm.Ibarrier()
        self._report(state=RankState.IDLE, queued=0, is_requesting=False, changed_at=self.entered_at)
        self.poll(force=True)
        if self._last_busy_epoch == self.epoch:
            self._announce(self.entered_at)

    def request_work(self) -> None:
        """This replica has no request left, IDLE, and could response those of others. Returns at once."""
        assert self._stealing is not None, "work stealing is off"
        self._report(state=RankState.IDLE, queued=0, is_requesting=True)
        self.poll(force=True)  # NO_WORK may be there already
        self._stealing.request(self._me.seq)
        self.poll(force=True)

    def receive_work(self) -> Sequence[tuple[int, int]] | None:
        """Polls; returns transferred requests, this rank being BUSY again, an empty sequence when no replica has a
        queue any more, or None: no response yet.
        """
        assert self._stealing is not None, "work stealing is off"
        self.poll()
        if requests := self._stealing.take_received():
            self._report(state=RankState.BUSY, queued=-1, is_requesting=False)
            return requests
        return () if self._stealing.is_settled else None

    def test_done(self) -> bool:
        """Polls, then tests the barrier: True when every rank has entered, and this one may leave."""
        assert self._barrier is not None or self._is_complete, "test_done needs enter_done before it"
        self.poll()
        if self._barrier is not None and self._barrier.Test():
            self._barrier, self._is_complete = None, True
        return self._is_complete

    def poll(self, force: bool = False) -> None:
        """Handles messages that have come, sends those that are due.

        About a microsecond within `poll_ms` of the last call, ten where no message has come.
        """
        now = self._clock()
        if not force and now - self._polled_at < self._poll_seconds:
            return
        self._polled_at = now
        for message in self._mailbox.drain():
            self._handle(message)
        if self._board is not None and not self.is_over:
            self._lead(self._board)

    def close(self) -> None:
        """Frees the communicator. Collective, outside a window. Gives up on messages after two seconds."""
        if self._barrier is not None:
            return  # the job ends in the middle of a window, by MPI_Abort
        deadline = self._clock() + _CLOSE_S
        list(self._mailbox.drain())
        while self._mailbox.outstanding and self._clock() < deadline:
            time.sleep(self._poll_seconds)
            list(self._mailbox.drain())
        if not self._mailbox.outstanding:
            self._comm.Free()

    # -- messages -------------------------------------------------------------------------------------------

    def _send(
        self,
        to: int,
        kind: Kind,
        value: float = 0.0,
        requests: Sequence[tuple[int, int]] = (),
        report: Report | None = None,
    ) -> None:
        """A message of this rank to itself is handled at once."""
        message = Message(kind, self.rank, self.epoch, value, tuple(requests), report)
        if to == self.rank:
            self._handle(message)
        else:
            self._mailbox.send(to, message)

    def _report(self, **changes: Any) -> None:
        """Changes fields of this rank's report, and sends it to rank 0 if this rank leads its replica."""
        self._me = replace(self._me, seq=self._me.seq + 1, **changes)
        if self._is_group_leader:
            self._send(0, Kind.REPORT, report=self._me)

    def _handle(self, message: Message) -> None:
        kind, epoch = message.kind, message.epoch
        if message.report is not None:
            assert self._board is not None, "reports go to rank 0"
            self._board.update(message.report)
        elif kind is Kind.LAST_BUSY:
            self._last_busy_epoch = max(self._last_busy_epoch, epoch)
        elif epoch < self.epoch:
            return
        elif kind is Kind.ALL_DONE:
            self._is_over, self.last_done_at = True, message.value
        elif self._stealing is not None and epoch > self.epoch:
            self._early.append(message)  # its sender has left a window that this rank is still in
        elif self._stealing is not None:
            left = self._stealing.handle(message)
            if left is not None:
                self._report(queued=left)  # so that rank 0 may choose this victim again

    # -- on rank 0 ------------------------------------------------------------------------------------------

    def _lead(self, board: StatusBoard) -> None:
        """Sends what follows from the board: assignments, the end of the window, the last busy rank."""
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

    def _announce(self, last_done_at: float) -> None:
        """Sends ALL_DONE to every rank, unless this rank has sent or received it in this window."""
        if self._is_over:
            return
        self._is_over, self.last_done_at = True, last_done_at
        for other in range(self.size):
            if other != self.rank:
                self._send(other, Kind.ALL_DONE, last_done_at)
