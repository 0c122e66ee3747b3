"""Places where a command will write: problems with them, found before anything is made."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_tlt.errors import ConfigProblem


def output_file_problems(field: str, path: str | Path | None, may_exist: bool = True) -> list[ConfigProblem]:
    """Problems with writing a file at `path` (None: nothing is to be written). Creates nothing.

    Missing parent directories are no problem: the commands make them. `may_exist`: whether it may replace a file.
    """
    if path is None:
        return []
    file = Path(path)
    if file.is_dir():
        return [ConfigProblem(field, str(path), "is a directory: name a file")]
    if file.is_file() and not may_exist:
        return [ConfigProblem(field, str(path), "exists: --overwrite replaces it")]
    if file.exists():
        return [] if os.access(file, os.W_OK) else [ConfigProblem(field, str(path), "is not writable")]
    return output_directory_problems(field, file.parent, given=path)


def output_directory_problems(
    field: str, path: str | Path, given: str | Path | None = None, must_be_writable: bool = True
) -> list[ConfigProblem]:
    """Problems with making `path`, or with writing into it where it exists. Creates nothing.

    `given` is the value to show, if it is not `path`. Without `must_be_writable` only a file in the way counts: a
    login node may not have the file system of the ranks.
    """
    absolute = Path(path).absolute()
    existing = next(p for p in (absolute, *absolute.parents) if os.path.lexists(p))
    shown = str(path if given is None else given)
    if not existing.is_dir():
        return [ConfigProblem(field, shown, f"{existing} is not a directory")]
    if must_be_writable and not os.access(existing, os.W_OK | os.X_OK):
        return [ConfigProblem(field, shown, f"{existing} is not writable")]
    return []
