"""An output directory that appears whole or not at all: written beside its name, synced, renamed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_tlt.actor.checkpoint_files import sync
from megatron_tlt.errors import CheckpointError


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
