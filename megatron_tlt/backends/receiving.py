"""The engine's side of a push of weights: versions, tensors, the drafter kept until the end.

Runs in the engine's environment; only the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
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
        self._drafter: list[Message] = []
        self._sums: dict[str, int] = {}

    def begin(self, message: Message, in_flight: int) -> None:
        """Opens a push; one that was open is given up. Raises RuntimeError while requests run."""
        if in_flight:
            raise RuntimeError(f"{in_flight} requests are in flight: weights change between rollouts only")
        self.version, self.verify = message["version"], message["verify"]
        self._drafter, self._sums = [], {}

    async def take_weights(self, message: Message) -> Message:
        """Tensors of policy or drafter; the reply has no fields. Raises RuntimeError for those of another push."""
        entries = message["entries"]
        self._check_open(message["version"])
        if message["drafter"]:  # kept until the end: loaded as a whole, after the policy whose embedding it shares
            self._drafter += entries
        else:
            self._sums |= await self._load(entries, self.verify)
        return {}

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
