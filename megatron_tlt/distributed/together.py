"""Errors of one rank on all ranks, so that none waits in a collective for one that has failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from megatron_tlt.errors import CheckpointError, TltError

if TYPE_CHECKING:
    from megatron_tlt.distributed.world import World


class SingleProcess:
    """Takes the place of `World` in one process, without MPI."""

    rank, size, is_main = 0, 1, True

    def heartbeat(self, **figures: Any) -> None:
        """Without a watchdog it does nothing."""

    def wait_for_all(self) -> None:
        """Waits for no one."""

    def barrier(self) -> None:
        """Waits for no one."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """[value]."""
        return [value]

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """`value`."""
        return value


Ranks: TypeAlias = "World | SingleProcess"


@contextmanager
def together(ranks: Ranks, intent: str = "") -> Iterator[None]:
    """Raises on every rank if the block raised a TltError or an OSError on one. Collective.

    It waits for the slowest rank without a timeout. A rank raises its own TltError. An OSError becomes a
    CheckpointError, "cannot INTENT: ..."; a rank that has not failed raises a CheckpointError that names those that
    have.
    """
    own: TltError | None = None
    try:
        yield
    except TltError as error:
        own = error
    except OSError as error:
        own = CheckpointError(f"cannot {intent}: {error}" if intent else str(error))
        own.__cause__ = error
    ranks.wait_for_all()  # a rank's share of files may take longer than a collective may
    texts = ranks.all_gather_object(None if own is None else str(own))
    if own is not None:
        raise own
    if failed := [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]:
        raise CheckpointError("; ".join(failed))
