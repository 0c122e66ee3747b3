"""Converting with one process or with many ranks: errors on every rank, an output that appears whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from megatron_tlt.checkpoint.atomic import atomic_directory, problem_of
from megatron_tlt.errors import CheckpointError, TltError

if TYPE_CHECKING:
    from megatron_tlt.distributed.world import World

_SPARE = 64 << 20  # bytes for config.json, tokenizer, metadata and what torch.save adds to every tensor


class SingleProcess:
    """Stands in for `World` in one process, without MPI."""

    rank, size, is_main = 0, 1, True

    def all_gather_object(self, value: Any) -> list[Any]:
        """[value]."""
        return [value]

    def broadcast_object(self, value: Any) -> Any:
        """`value`."""
        return value


Ranks: TypeAlias = "World | SingleProcess"


@contextmanager
def together(ranks: Ranks) -> Iterator[None]:
    """Raises on every rank if the block raised a TltError or an OSError on one. Collective.

    A rank raises its own error, or a CheckpointError that names the ranks that failed.
    """
    own: Exception | None = None
    try:
        yield
    except (TltError, OSError) as error:
        own = error
    texts = ranks.all_gather_object(None if own is None else str(own))
    if own is not None:
        raise own if isinstance(own, TltError) else CheckpointError(str(own)) from own
    if failed := [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]:
        raise CheckpointError("; ".join(failed))


@contextmanager
def new_directory(out: Path, num_bytes: int, ranks: Ranks) -> Iterator[Path]:
    """`atomic_directory` that rank 0 makes, and renames when the block has ended well on every rank. Collective.

    Raises CheckpointError if `out` exists or `num_bytes` do not fit on its disk.
    """
    with ExitStack() as stack:
        scratch = out
        with together(ranks):
            if ranks.is_main:
                check_room(out, num_bytes)
                scratch = stack.enter_context(atomic_directory(out))
        with together(ranks):
            yield Path(ranks.broadcast_object(str(scratch)))
        with together(ranks):
            stack.close()


def check_room(out: Path, num_bytes: int) -> None:
    """Raises CheckpointError if `out` cannot be made or would not fit on its disk."""
    if problem := problem_of(out):
        raise CheckpointError(problem)
    free, needed = shutil.disk_usage(out.parent).free, num_bytes + _SPARE
    if free < needed:
        raise CheckpointError(
            f"{out} needs {gib(needed)}, but only {gib(free)} are free in {out.parent.resolve()}"
        )


def gib(num_bytes: float) -> str:
    """A number of bytes for people: `1.50 GiB`."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"
