"""An output directory that appears whole or not at all: written beside its name, synced, renamed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from megatron_tlt.actor.checkpoint_files import sync
from megatron_tlt.errors import CheckpointError


def scratch_beside(out: Path) -> Path:
    """Makes a directory `.NAME.unfinished-*` beside `out`, with the permissions that `mkdir` gives."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.unfinished-", dir=out.parent))
    umask = os.umask(0)
    os.umask(umask)
    scratch.chmod(0o777 & ~umask)  # mkdtemp makes it private
    return scratch


def reveal(scratch: Path, out: Path) -> None:
    """Syncs everything in `scratch` to the disk and renames it to `out`. Raises CheckpointError if `out` exists."""
    for path in scratch.rglob("*"):
        sync(path)
    sync(scratch)
    if out.exists():
        raise CheckpointError(f"{out} has appeared in the meantime: it is left as it is")
    os.rename(scratch, out)
    sync(out.parent)
