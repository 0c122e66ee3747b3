"""Converting with one process or with many ranks: errors on every rank, an output that appears whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from megatron_tlt.checkpoint.atomic import reveal, scratch_beside
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
    """A scratch directory beside `out`, renamed to it when the block has ended well on every rank. Collective.

    On an error it is removed; a killed process leaves `.NAME.unfinished-*` behind. Raises CheckpointError if `out`
    exists or `num_bytes` do not fit on its disk.
    """
    scratch = out
    with together(ranks):
        if ranks.is_main:
            check_room(out, num_bytes)
            scratch = scratch_beside(out)
    scratch = Path(ranks.broadcast_object(str(scratch)))
    try:
        with together(ranks):
            yield scratch
        with together(ranks):
            if ranks.is_main:
                reveal(scratch, out)
    except BaseException:
        if ranks.is_main:
            shutil.rmtree(scratch, ignore_errors=True)
        raise


def check_room(out: Path, num_bytes: int) -> None:
    """Raises CheckpointError if `out` exists, has no parent directory, or would not fit on its disk."""
    if out.exists() or out.is_symlink():
        raise CheckpointError(f"{out} exists: name a new directory, or remove it first")
    if not out.parent.is_dir():
        raise CheckpointError(f"{out.parent} does not exist: make it first")
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
