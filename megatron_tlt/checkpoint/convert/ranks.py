"""The ranks of a conversion: one process without MPI, or the world."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from megatron_tlt.errors import CheckpointError, TltError


class Ranks(Protocol):
    """What a conversion needs of `distributed.world.World`."""

    @property
    def rank(self) -> int:
        """This process."""

    @property
    def size(self) -> int:
        """All processes."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value. Collective."""

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """The value of `source`. Collective."""


class Alone:
    """One process: no MPI is touched."""

    rank, size, is_main = 0, 1, True

    def all_gather_object(self, value: Any) -> list[Any]:
        """Its own."""
        return [value]

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Its own."""
        return value


@contextmanager
def together(ranks: Ranks) -> Iterator[None]:
    """Ends the block on every rank with an error if it failed on one. Collective.

    A rank's own error is raised as it is there, and as a CheckpointError that names the rank elsewhere.
    """
    mine: Exception | None = None
    try:
        yield
    except (TltError, OSError) as error:
        mine = error
    failed = [
        f"rank {rank}: {text}"
        for rank, text in enumerate(ranks.all_gather_object(None if mine is None else str(mine)))
        if text
    ]
    if mine is not None:
        raise mine if isinstance(mine, TltError) else CheckpointError(str(mine)) from mine
    if failed:
        raise CheckpointError("; ".join(failed))
