"""A directory that appears whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_tlt.actor.checkpoint_files import reveal, scratch_beside
from megatron_tlt.checkpoint.convert.ranks import Ranks, together
from megatron_tlt.errors import CheckpointError

_SPARE = 16 << 20  # for config.json, tokenizer and metadata


def check_room(out: Path, num_bytes: int) -> None:
    """Raises CheckpointError if `out` exists, has no parent directory, or would not fit on its disk. Writes nothing."""
    if out.exists() or out.is_symlink():
        raise CheckpointError(f"{out} exists: name a new directory, or remove it first")
    if not out.parent.is_dir():
        raise CheckpointError(f"{out.parent} does not exist: make it first")
    free = shutil.disk_usage(out.parent).free
    if free < num_bytes + _SPARE:
        raise CheckpointError(
            f"{out} needs {gib(num_bytes + _SPARE)}, but only {gib(free)} are free in {out.parent.resolve()}"
        )


@contextmanager
def appearing(out: Path, ranks: Ranks) -> Iterator[Path]:
    """A scratch directory beside `out` that gets its name when the block ends well on every rank. Collective.

    On an error it is removed. A killed process leaves it behind: its name, `.NAME.unfinished-*`, tells.
    """
    scratch: Path | None = None
    with together(ranks):
        if ranks.is_main:
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


def gib(num_bytes: float) -> str:
    """Bytes for people."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"
