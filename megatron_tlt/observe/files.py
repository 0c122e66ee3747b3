"""Files that appear whole or not at all: written beside their place, synced, renamed. Stdlib only."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Adds `path` to an OSError of the block that names no file: those of writes and flushes do not."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def write_atomically(path: Path, lines: Iterable[str]) -> None:
    """Writes lines to a temporary file beside `path` and renames it: readers see the old file or the whole new one.

    A link stays and its target is replaced. Pipes and devices (/dev/stdout) are written into.
    """
    if path.exists() and not path.is_file():
        with naming(path), path.open("w", encoding="utf-8") as stream:
            stream.writelines(line + "\n" for line in lines)
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(path) as scratch, scratch.open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """A scratch file beside `path`, synced and renamed to it when the block ends well, else removed. Raises OSError."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path):
            yield scratch
            sync(scratch)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


@contextmanager
def replace_files(target: Path, last: str, stale: Iterable[str] = ()) -> Iterator[Path]:
    """A scratch directory whose files go into `target`, which may exist, when the block ends well.

    The old file `last`, without which `target` is refused, is removed before the first file is replaced, and the new
    one comes last: a crash leaves a directory that is refused, never a mixture. Other files that match the patterns
    `stale` are removed. Raises OSError; a directory that was made for this is removed then.
    """
    is_new = not target.exists()
    target.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".saving-", dir=target))
    try:
        with naming(target):
            yield scratch
        names = sorted((file.name for file in scratch.iterdir()), key=lambda name: name == last)
        for name in names:
            sync(scratch / name)
        (target / last).unlink(missing_ok=True)
        for old in [file for pattern in stale for file in target.glob(pattern) if file.name not in names]:
            old.unlink(missing_ok=True)
        for name in names:
            os.replace(scratch / name, target / name)
        sync(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if is_new and not (target / last).exists():
            shutil.rmtree(target, ignore_errors=True)


def sync(path: Path) -> None:
    """Flushes a file or a directory entry onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
