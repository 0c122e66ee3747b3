"""Requests and messages of MPI that are complete at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Done:
    """A request, or a probed message, that completes at once."""

    data: bytes = b""

    def Irecv(self, buffer: bytearray) -> Done:
        buffer[: len(self.data)] = self.data
        return self

    def Test(self) -> bool:
        return True
