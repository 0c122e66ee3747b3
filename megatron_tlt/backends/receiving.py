"""The engine's side of a push of weights: versions, tensors that come in parts, the drafter kept until the end.

Runs in the engine's environment; only the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

Message = dict[str, Any]
Load = Callable[[list[Message], bool], Awaitable[dict[str, int]]]


class PushReceiver:
    """One push at a time. `load(entries, verify)` loads tensors of the policy and returns their checksums."""

    def __init__(self, load: Load):
        self._load = load
        self.version: int | None = None
        """Version of the push under way."""
        self.verify = False
        self._part: tuple[Message, bytearray] | None = None  # a tensor that comes in parts
        self._drafter: list[Message] = []
        self._sums: dict[str, int] = {}

    def begin(self, message: Message, in_flight: int) -> None:
        """Opens a push; one that was open is given up. Raises RuntimeError while requests run."""
        if in_flight:
            raise RuntimeError(f"{in_flight} requests are in flight: weights change between rollouts only")
        self.version, self.verify = message["version"], message["verify"]
        self._part, self._drafter, self._sums = None, [], {}

    async def take_weights(self, message: Message) -> Message:
        """Whole tensors; the reply has no fields. Raises RuntimeError for tensors of another push."""
        await self._take(message["version"], message["entries"], message["drafter"])
        return {}

    async def take_part(self, message: Message) -> Message:
        """Bytes of one tensor, in order; the last ones complete it. The reply has no fields.

        Raises ValueError, RuntimeError.
        """
        entry, data = self._part or (message["entry"], bytearray())
        if entry["name"] != message["entry"]["name"] or message["offset"] != len(data):
            raise ValueError(f"bytes of {message['entry']['name']} came at {message['offset']} out of order")
        data += message["data"]
        self._part = (entry, data)
        if len(data) >= message["total"]:
            self._part = None
            await self._take(message["version"], [{**entry, "data": bytes(data)}], message["drafter"])
        return {}

    async def _take(self, version: int, entries: Sequence[Message], drafter: bool) -> None:
        self._check_open(version)
        if drafter:  # kept until the end: it is loaded as a whole, after the policy whose embedding it shares
            self._drafter += entries
        else:
            self._sums |= await self._load(list(entries), self.verify)

    def drafter_of(self, version: int) -> list[Message]:
        """The drafter's tensors, when all tensors of the push have come. Raises RuntimeError for another push."""
        self._check_open(version)
        return self._drafter

    def close(self, drafter_sums: dict[str, int]) -> Message:
        """Ends the push; returns the checksums that the reply carries."""
        sums = {"checksums": self._sums, "drafter_checksums": drafter_sums}
        self.version, self._drafter, self._sums = None, [], {}
        return sums

    def check_closed(self) -> None:
        """Raises RuntimeError while a push is open."""
        if self.version is not None:
            raise RuntimeError(f"the push of version {self.version} has not finished")

    def _check_open(self, version: int) -> None:
        if self.version != version:
            raise RuntimeError(f"tensors of version {version} came into the push of {self.version}")
