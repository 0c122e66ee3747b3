"""Queued requests of a busy replica go to one that has run dry (`idle.work_stealing`). Torch-free, MPI-free.

    dry replica                    rank 0: the board                busy replica
      | ---- ASK ---------------------> |                                |
      |                                 | ---- GRANT to whom ----------> |
      | <------------------------- GIVE, between two steps of its engine |
      | BUSY with them, then it asks again
      | <--- DRY ---------------------- |   nobody has a queue any more: into the done barrier

Every ASK is answered once, by the GIVE of whom rank 0 chose or by DRY, and nobody enters the barrier before: so no
message here outlives its window. An empty GIVE (the queue ran out on the way) is followed by the next ASK. What was
taken over can be taken over again while it waits. DRY goes to those, too, who have not asked: they need not, so that
the last one loses no time. Queues grow by gifts only, and rank 0 waits for these; a request that is preempted before it
has decoded may be in one again, and is then answered where it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from megatron_tlt.idle.board import StatusBoard
from megatron_tlt.idle.messages import MAX_PIECES, Kind, Message, RequestRange

Give = Callable[[], tuple[Sequence[RequestRange], int]]
"""Takes a share out of this replica's queue; with it, how many are left there."""


class Send(Protocol):
    """Brings a message of the present window to a rank, which may be this one."""

    def __call__(self, to: int, kind: Kind, value: float = 0.0, pieces: Sequence[RequestRange] = ()) -> None: ...


def pieces_of(requests: Iterable[tuple[int, int]]) -> list[RequestRange]:
    """Runs of (prompt id, sample index), in order."""
    pieces: list[RequestRange] = []
    for prompt_id, index in sorted(requests):
        last = pieces[-1] if pieces else None
        if last is not None and (last.prompt_id, last.first + last.count) == (prompt_id, index):
            pieces[-1] = RequestRange(prompt_id, last.first, last.count + 1)
        else:
            pieces.append(RequestRange(prompt_id, index, 1))
    return pieces


class Takeover:
    """One rank's part: as a dry one, as a busy one, and on rank 0 as the one that chooses."""

    def __init__(self, speakers: Sequence[int], send: Send, give: Give):
        """`speakers`: the first ranks of all replicas."""
        self._speakers, self._send, self._give = speakers, send, give
        self.begin()

    def begin(self) -> None:
        """The next window: nothing asked, nothing known."""
        self._asked = self._dry = self._has_told = False
        self._seq = 0
        self._came: list[RequestRange] = []
        self._whole: tuple[RequestRange, ...] = ()
        # Who asked and has not been answered, with the number of the report in which it said that it is dry.
        self._pending: deque[tuple[int, int]] = deque()
        # By rank: its newest report when it was chosen to give; that of its ASK when somebody was chosen to give to it.
        self._givers: dict[int, int] = {}
        self._takers: dict[int, int] = {}

    @property
    def is_settled(self) -> bool:
        """Whether nothing can come to this rank any more."""
        return self._dry and not self._asked and not self._whole

    @property
    def must_lead(self) -> bool:
        """On rank 0: whether there may be something to choose or to tell."""
        return bool(self._pending) or not self._has_told

    def ask(self, seq: int) -> None:
        """This replica is dry, as its report number `seq` says."""
        assert not self._asked and not self._whole, "one ASK at a time"
        self._seq = seq
        if not self._dry:
            self._asked = True
            self._send(0, Kind.ASK, seq)

    def collect(self) -> tuple[RequestRange, ...]:
        """What was given to this rank, once."""
        whole, self._whole = self._whole, ()
        return whole

    def handle(self, message: Message) -> int | None:
        """Takes a message of the present window; if this rank was to give, how many are left in its queue."""
        if message.kind is Kind.ASK:
            self._pending.append((message.sender, int(message.value)))
            self._takers.pop(message.sender, None)
        elif message.kind is Kind.DRY:
            self._dry = True
            self._asked &= not message.value
        elif message.kind is Kind.GIVE:
            self._take(message)
        elif message.kind is Kind.GRANT:
            pieces, left = self._give()
            self._hand_over(int(message.value), pieces)
            return left
        return None

    def lead(self, board: StatusBoard) -> None:
        """On rank 0: chooses for each ASK the longest queue, one ASK a report of its owner; or says: none."""
        queues, is_all = board.queues()
        # What was given to a rank is its queue from the report on in which it is busy with it.
        self._takers = {r: seq for r, seq in self._takers.items() if board.seq_of(r) <= seq or board.asks(r)}
        if not self._has_told and is_all and not queues and not self._takers:
            self._has_told = True
            for rank in set(self._speakers).difference(taker for taker, _ in self._pending):
                self._send(rank, Kind.DRY)
        if self._has_told:
            while self._pending:
                self._send(self._pending.popleft()[0], Kind.DRY, 1.0)
            return
        free = [report for report in queues if self._givers.get(report.rank) != report.seq]
        free.sort(key=lambda report: (report.queued, -report.rank))
        while self._pending and free:
            taker, seq = self._pending.popleft()
            giver = free.pop()
            self._givers[giver.rank], self._takers[taker] = giver.seq, seq
            self._send(giver.rank, Kind.GRANT, taker)

    def _hand_over(self, taker: int, pieces: Sequence[RequestRange]) -> None:
        """Sends them, many in one message; none at all in one, too."""
        for start in range(0, max(1, len(pieces)), MAX_PIECES):
            some = pieces[start : start + MAX_PIECES]
            self._send(taker, Kind.GIVE, float(start + MAX_PIECES >= len(pieces)), some)

    def _take(self, message: Message) -> None:
        self._came += message.pieces
        if not message.value:  # the others are on their way
            return
        self._asked, self._whole, self._came = False, tuple(self._came), []
        if not self._whole:
            self.ask(self._seq)
