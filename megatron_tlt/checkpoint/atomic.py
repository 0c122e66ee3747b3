"""An output directory that appears whole or not at all: written beside its name, synced, renamed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megatron_tlt.distributed.together import Ranks, together
from megatron_tlt.errors import CheckpointError
from megatron_tlt.observe.files import sync

_SPARE = 64 << 20  # bytes for config.json, tokenizer, metadata and what torch.save adds to every tensor


def problem_of(out: Path) -> str | None:
    """What keeps a new directory `out` from being made."""
    try:
        if out.exists() or out.is_symlink():
            return f"{out} exists: it is not written over, name a new directory"
        return None if out.parent.is_dir() else f"{out.parent} does not exist: make it first"
    except OSError as error:
        return str(error)


@contextmanager
def atomic_directory(out: Path) -> Iterator[Path]:
    """A scratch directory beside `out`, renamed to `out` when the block ends; removed if it raises.

    A killed process leaves it, `.NAME.unfinished-*`, behind. Raises CheckpointError if `out` exists by then.
    """
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.unfinished-", dir=out.parent))
    try:
        umask = os.umask(0)
        os.umask(umask)
        scratch.chmod(0o777 & ~umask)  # mkdtemp makes it private
        yield scratch
        for path in scratch.rglob("*"):
            sync(path)
        sync(scratch)
        if out.exists():
            raise CheckpointError(f"{out} has appeared in the meantime: it is left as it is")
        os.rename(scratch, out)
        sync(out.parent)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


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
