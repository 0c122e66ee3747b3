"""Small messages of one rank over a communicator. Torch-free.

A send is non-blocking and kept until it is tested complete; a receive is a matched probe with a non-blocking receive.
No call here waits for another rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

    from megatron_tlt.idle.messages import Message

_MISSES = 8  # probes without a message until the queue counts as empty: each makes progress for about one message


class Mailbox:
    """Sends and receives messages, pickled, over one communicator."""

    def __init__(self, comm: MPI.Comm):
        self._comm = comm
        self._sends: list[MPI.Request] = []
        self._receives: list[MPI.Request] = []

    @property
    def outstanding(self) -> int:
        """Sends and receives that have not completed."""
        return len(self._sends) + len(self._receives)

    def send(self, to: int, message: Message) -> None:
        """Sends; the receiver gets a copy."""
        request = self._comm.isend(message, dest=to)
        if not request.Test():
            self._sends.append(request)

    def drain(self) -> Iterator[Message]:
        """Yields all messages that have arrived."""
        if self._sends:
            self._sends = [request for request in self._sends if not request.Test()]
        misses = 0
        while misses < _MISSES:
            found = self._comm.improbe()
            if found is None:
                misses += 1
                continue
            misses = 0
            self._receives.append(found.irecv())
            yield from self._completed()
        yield from self._completed()

    def _completed(self) -> Iterator[Message]:
        """Received messages in the order of arrival: one that is not complete holds back those behind it."""
        while self._receives:
            is_complete, message = self._receives[0].test()
            if not is_complete:
                return
            assert message is not None
            del self._receives[0]
            yield message
