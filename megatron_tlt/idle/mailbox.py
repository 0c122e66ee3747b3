"""Small messages of one rank over a communicator. Torch-free.

A send is non-blocking and kept until it is tested complete; a receive is a matched probe with a non-blocking receive.
No call here waits for another rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_tlt.idle.messages import MAX_BYTES

if TYPE_CHECKING:
    from mpi4py import MPI

_MISSES = 8  # probes without a message until the queue counts as empty: each makes progress for about one message


class Mailbox:
    """Sends and receives byte messages over one communicator."""

    def __init__(self, comm: MPI.Comm):
        self._comm = comm
        self._sends: list[tuple[MPI.Request, bytearray]] = []
        self._receives: list[tuple[MPI.Request, bytearray]] = []

    @property
    def outstanding(self) -> int:
        """Sends and receives that have not completed."""
        return len(self._sends) + len(self._receives)

    @property
    def is_sending(self) -> bool:
        """Whether a send is under way: the receiver has not polled for a while."""
        return bool(self._sends)

    def send(self, to: int, data: bytearray) -> None:
        """Sends; `data` must not change afterwards."""
        request = self._comm.Isend(data, dest=to)
        if not request.Test():
            self._sends.append((request, data))

    def drain(self) -> Iterator[bytearray]:
        """Yields all messages that have arrived."""
        if self._sends:
            self._sends = [(r, data) for r, data in self._sends if not r.Test()]
        misses = 0
        while misses < _MISSES:
            message = self._comm.Improbe()
            if message is None:
                misses += 1
                continue
            misses = 0
            data = bytearray(MAX_BYTES)
            self._receives.append((message.Irecv(data), data))
            yield from self._completed()
        yield from self._completed()

    def _completed(self) -> Iterator[bytearray]:
        """Received messages in the order of arrival: one that is not complete holds back those behind it."""
        while self._receives and self._receives[0][0].Test():
            yield self._receives.pop(0)[1]
