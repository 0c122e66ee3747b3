"""A communicator of lists, whose requests are complete at once, and a clock that is set by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_tlt.idle.messages import Message


@dataclass
class Clock:
    """A `Clock` that stands still unless a test moves it."""

    time: float = 0.0

    def now(self) -> float:
        return self.time


@dataclass
class Done:
    """A request, or a probed message, that completes at once."""

    message: Message | None = None

    def irecv(self) -> Done:
        return self

    def test(self) -> tuple[bool, Message | None]:
        return True, self.message

    def Test(self) -> bool:
        return True


@dataclass
class Barrier:
    """An Ibarrier that a test completes."""

    complete: bool = False

    def Test(self) -> bool:
        return self.complete


@dataclass
class FakeComm:
    """The communicator of one rank: what it sends is kept, what it receives is put into `inbox`."""

    rank: int
    size: int
    inbox: list = field(default_factory=list)
    sent: list = field(default_factory=list)
    barriers: list = field(default_factory=list)
    misses: int = 0  # probes without a message before the next one shows, as with MPI

    def Dup(self) -> FakeComm:
        return self

    def Free(self) -> None:
        self.sent.append("freed")

    def isend(self, message: Message, dest: int) -> Done:
        self.sent.append((dest, message))
        return Done()

    def improbe(self) -> Done | None:
        if self.misses:
            self.misses -= 1
            return None
        return Done(self.inbox.pop(0)) if self.inbox else None

    def Ibarrier(self) -> Barrier:
        self.barriers.append(Barrier())
        return self.barriers[-1]

    def take_sent(self) -> list[tuple[int, Message]]:
        taken, self.sent = self.sent, []
        return taken
