"""An output directory that appears whole or not at all: written beside its name, synced, renamed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megatron_tlt.config.checks.files import container_problem, is_empty, is_read, maker_of, note_maker
from megatron_tlt.distributed.together import Ranks, together
from megatron_tlt.errors import CheckpointError
from megatron_tlt.observe.files import naming, sync

_SPARE = 64 << 20  # bytes for config.json, tokenizer, metadata and the overhead of torch.save a tensor


def problem_of(out: Path, command: str, overwrite: bool = False, sources: Iterable[Path] = ()) -> str | None:
    """The problem with making a directory `out`, with `overwrite` in the place of an older one; None: there is none.

    Nothing is replaced but what the same command made, and none of the `sources` that the new directory is made from.
    """
    try:
        if problem := container_problem(out):
            return f"{out} {problem}"
        if not (out.exists() or out.is_symlink()):
            return None if out.parent.is_dir() else f"{out.parent} does not exist: make it first"
        is_directory = out.is_dir() and not out.is_symlink()
        is_new = is_directory and is_empty(out)
        if not is_new and not overwrite:
            return f"{out} exists: --overwrite replaces it"
        if out.absolute().name in ("", ".."):
            return f"{out} is not replaced: name the directory itself"
        if is_read(out, sources):
            return f"{out} is not replaced: it holds what is read"
        is_own = is_directory and (is_new or maker_of(out) == command)
        return None if is_own else f"{out} is not replaced: it is no directory that `{command}` made"
    except OSError as error:
        return str(error)


@contextmanager
def atomic_directory(out: Path, command: str, overwrite: bool = False, sources: Iterable[Path] = ()) -> Iterator[Path]:
    """A scratch directory beside `out`, renamed to `out` when the block ends; removed if it raises.

    A killed process leaves it, `.NAME.unfinished-*`, behind, and the directory that it was replacing as
    `.NAME.replaced-*`. Raises CheckpointError if by then `out` cannot be made any more (`problem_of`).
    """
    out = out.absolute()  # `.` has no name, and its parent is not the directory that holds it
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.unfinished-", dir=out.parent))
    try:
        umask = os.umask(0)
        os.umask(umask)
        scratch.chmod(0o777 & ~umask)  # mkdtemp makes it private
        yield scratch
        note_maker(scratch, command)
        for path in scratch.rglob("*"):
            sync(path)
        sync(scratch)
        if problem := problem_of(out, command, overwrite, sources):  # others may have written meanwhile
            raise CheckpointError(problem)
        _move(scratch, out)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _move(scratch: Path, out: Path) -> None:
    """Renames `scratch` to `out`. What is there is removed once the new one is on the disk, and put back on failure."""
    old = out.with_name(f".{out.name}.replaced-{scratch.name.rpartition('-')[2]}")
    try:
        if out.exists():
            os.rename(out, old)
        os.rename(scratch, out)
    except BaseException:  # a signal between the two renames, too
        if old.exists() and not out.exists():
            os.rename(old, out)
        raise
    sync(out.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def new_directory(
    out: Path, command: str, num_bytes: int, ranks: Ranks, overwrite: bool = False, sources: Iterable[Path] = ()
) -> Iterator[Path]:
    """`atomic_directory` that rank 0 makes, and renames when the block has ended well on every rank. Collective.

    Raises CheckpointError if `out` cannot be made (`problem_of`) or `num_bytes` do not fit on its disk.
    """
    with ExitStack() as stack:
        scratch = out
        with together(ranks):
            if ranks.is_main:
                if problem := problem_of(out, command, overwrite, sources):
                    raise CheckpointError(problem)
                check_room(out, num_bytes)
                scratch = stack.enter_context(atomic_directory(out, command, overwrite, sources))
        with together(ranks), naming(out):
            yield Path(ranks.broadcast_object(str(scratch)))
        with together(ranks), naming(out):
            stack.close()


def check_room(out: Path, num_bytes: int) -> None:
    """Raises CheckpointError if `out` would not fit on its disk."""
    free, needed = shutil.disk_usage(out.parent).free, num_bytes + _SPARE
    if free < needed:
        raise CheckpointError(f"{out} needs {gib(needed)}, but only {gib(free)} are free in {out.parent.resolve()}")


def gib(num_bytes: float) -> str:
    """A number of bytes for people: `1.50 GiB`."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"
