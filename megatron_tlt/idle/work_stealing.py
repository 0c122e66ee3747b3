"""Work stealing: a replica without requests responses queued ones of a busy replica (`idle.work_stealing`). Torch-free,
MPI-free.

    thief (no request left)        rank 0: the status board         victim (has a queue)
      | --- REQUEST_WORK -------------> |                                |
      |                                 | --- ASSIGN, naming the thief-> |
      | <------------------------ TRANSFER, between two steps of the victim's engine
      | BUSY with the transferred requests, then requests work again
      | <--- NO_WORK ------------------ |   no replica has a queue any more: into the done barrier

Who waits for whom: the thief for a response to its REQUEST_WORK, polling and sleeping; rank 0 and the victim do not.
Every REQUEST_WORK is served once, by the TRANSFER of the victim that rank 0 chose or by NO_WORK, and a replica enters
the done barrier only after that: so none of these messages outlives its window. An empty TRANSFER (the queue ran out
on the way) is followed by the next REQUEST_WORK. Rank 0 sends NO_WORK once, also to replicas that have not requested
any, so that the last one to finish does not wait for a response.

A transferred request may be stolen again while it waits. A preempted request that has not decoded yet may be in a queue
a second time; it is then answered where it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from megatron_tlt.idle.board import StatusBoard
from megatron_tlt.idle.messages import Kind, Message


class RequestQueue(Protocol):
    """The queue of this replica's engine."""

    def num_queued(self) -> int:
        """Requests that another replica could response; -1 while the next engine step may still change that."""

    def withdraw_share(self) -> list[tuple[int, int]]:
        """Removes a share of the queue (`policy.share_of_queue`) and returns it: (prompt id, sample index). Mutates."""


Send = Callable[..., None]
"""`send(to, kind, value=0.0, requests=())`: a message of the present window to a rank, which may be this one."""


class WorkStealing:
    """One rank's part in all three roles: thief, victim, and on rank 0 the one that assigns victims to thieves."""

    def __init__(self, leaders: Sequence[int], send: Send, queue: RequestQueue):
        """`leaders`: the ranks that report, one a replica."""
        self._leaders, self._send, self._queue = leaders, send, queue
        self.begin()

    def begin(self) -> None:
        """Forgets the window before."""
        self._has_requested = self._no_work = self._no_work_sent = False
        self._seq = 0
        self._received: tuple[tuple[int, int], ...] = ()
        # On rank 0. Thieves without a response, each with the number of the report that says that it is idle.
        self._thieves: deque[tuple[int, int]] = deque()
        # Numbers of reports by rank: of a victim, when it was last assigned; of a thief, when it was assigned a victim.
        self._victims: dict[int, int] = {}
        self._assigned: dict[int, int] = {}

    @property
    def queued(self) -> int:
        """Requests that another replica could steal from this one now; -1: not known."""
        return self._queue.num_queued()

    @property
    def is_settled(self) -> bool:
        """Whether no request can come to this rank any more."""
        return self._no_work and not self._has_requested and not self._received

    @property
    def has_open_requests(self) -> bool:
        """On rank 0: whether `assign` may have something to do."""
        return bool(self._thieves) or not self._no_work_sent

    def request(self, seq: int) -> None:
        """As thief: this replica is idle, as its report number `seq` says."""
        assert not self._has_requested and not self._received, "one REQUEST_WORK at a time"
        self._seq = seq
        if not self._no_work:
            self._has_requested = True
            self._send(0, Kind.REQUEST_WORK, seq)

    def take_received(self) -> tuple[tuple[int, int], ...]:
        """Requests that were transferred to this rank since the last call."""
        received, self._received = self._received, ()
        return received

    def handle(self, message: Message) -> int | None:
        """Handles a message of the present window; as victim, returns how many requests are left in the queue."""
        if message.kind is Kind.REQUEST_WORK:
            self._thieves.append((message.sender, int(message.value)))
            self._assigned.pop(message.sender, None)
        elif message.kind is Kind.NO_WORK:
            self._no_work = True
            self._has_requested &= not message.value
        elif message.kind is Kind.TRANSFER:
            self._has_requested, self._received = False, message.requests
            if not self._received:
                self.request(self._seq)
        elif message.kind is Kind.ASSIGN:
            self._send(int(message.value), Kind.TRANSFER, requests=self._queue.withdraw_share())
            return self._queue.num_queued()
        return None

    def assign(self, board: StatusBoard) -> None:
        """On rank 0: assigns the longest queue to each thief, each victim once a report of its; or sends NO_WORK."""
        queues, is_complete = board.queues()
        # Transferred requests count from the thief's report on in which it is busy with them.
        self._assigned = {
            thief: seq for thief, seq in self._assigned.items()
            if (report := board.report_of(thief)) is None or report.seq <= seq or report.is_requesting
        }  # fmt: skip
        if not self._no_work_sent and is_complete and not queues and not self._assigned:
            self._no_work_sent = True
            for rank in set(self._leaders).difference(thief for thief, _ in self._thieves):
                self._send(rank, Kind.NO_WORK)
        if self._no_work_sent:
            while self._thieves:
                self._send(self._thieves.popleft()[0], Kind.NO_WORK, 1.0)
            return
        free = [report for report in queues if self._victims.get(report.rank) != report.seq]
        free.sort(key=lambda report: (report.queued, -report.rank))
        while self._thieves and free:
            thief, seq = self._thieves.popleft()
            victim = free.pop()
            self._victims[victim.rank], self._assigned[thief] = victim.seq, seq
            self._send(victim.rank, Kind.ASSIGN, thief)
