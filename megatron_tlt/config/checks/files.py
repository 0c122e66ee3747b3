"""Places where a command will write: problems with them, found before anything is made.

One rule for all commands: an output replaces what the same command made before, an empty directory or file, or nothing;
never what the command reads. A training replaces what it has finished only where it begins anew. A directory says by
`made_by.json` which command made it, a run's by its config.json; a file by its first bytes.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_tlt.config.json_reader import read_object
from megatron_tlt.config.run import UNFINISHED
from megatron_tlt.errors import CheckpointError, ConfigProblem, shortened

MADE_BY = "made_by.json"
MOUNTS = "MEGATRON_TLT_MOUNTS"  # in a job's container: what is mounted there, with colons between (slurm/common.sh)
_RUN_SECTIONS = {"model", "train", "rollout"}  # of the config.json of a run
_HEAD = 4096  # bytes of a file that say who wrote it
# What users and launchers put into a directory before a command writes there; commands write none of these names.
_NOTES = (".yaml", ".yml", ".txt", ".md", ".log", ".out", ".err", ".sh", ".sbatch")


def note_maker(directory: Path, command: str) -> None:
    """Writes which command made a directory. Raises OSError."""
    text = json.dumps({"program": "megatron-tlt", "command": command})
    (directory / MADE_BY).write_text(text + "\n", encoding="utf-8")


def maker_of(directory: Path) -> str | None:
    """The command that made a directory, also one that has not come to its end; None: none that is known."""
    if (directory / MADE_BY).is_file():
        command = _object(directory / MADE_BY).get("command")
        return command if isinstance(command, str) else None
    if (directory / "config.json").exists():
        return "train" if _object(directory / "config.json").keys() >= _RUN_SECTIONS else None
    if (directory / "lock").is_file():
        return "train"
    begun = _object(directory / UNFINISHED / "config.json").keys()
    if "sft" in begun:
        return "sft"
    return "drafter train" if begun >= _RUN_SECTIONS else None


def _object(file: Path) -> dict[str, Any]:
    try:
        return read_object(file)
    except CheckpointError:
        return {}


def container_problem(path: str | Path) -> str | None:
    """The problem with writing to `path` in the container of a batch job: outside its mounts the job's end removes it,
    and a requeued run would begin anew each time. Raises ValueError for a null byte.
    """
    if (mounts := os.environ.get(MOUNTS)) is None:
        return None
    place = Path(os.path.realpath(path))
    if any(place.is_relative_to(os.path.realpath(mount)) for mount in mounts.split(":")):
        return None
    above = os.path.dirname(os.path.abspath(path))
    return f"lies in the container and is lost when the job ends: mount a directory above it, as MOUNTS={above}:{above}"


def is_read(out: Path, sources: Iterable[str | Path | None]) -> bool:
    """Whether `out` is, or holds, one of the files or directories that a command reads."""
    places = [Path(os.path.realpath(source)) for source in sources if source is not None]
    return any(Path(os.path.realpath(out)) in (place, *place.parents) for place in places)


def is_empty(directory: Path) -> bool:
    """Whether nothing is in a directory. Raises OSError."""
    return not any(directory.iterdir())


def output_directory_problems(
    field: str,
    path: str | Path,
    command: str,
    sources: Iterable[str | Path | None] = (),
    must_be_writable: bool = True,
    replaces: bool = True,
) -> list[ConfigProblem]:
    """Problems with making `path`, or with writing into it where it exists. Creates nothing.

    `command`: what writes there. `sources`: what it reads. Without `must_be_writable` a directory that cannot be
    written to is no problem: a login node may not have the file system of the ranks. `replaces`: whether it may replace
    what it has finished there, and not only go on with what it has not.
    """
    problems = _place_problems(field, path, Path(path), must_be_writable)
    if problems or not Path(path).is_dir():
        return problems
    problem = _content_problem(Path(path), command, sources)
    if problem is None and not replaces and _is_finished(Path(path)):
        problem = f"holds what `{command}` has finished: name another directory; checkpoint.resume=never replaces it"
    return [] if problem is None else [ConfigProblem(field, str(path), problem)]


def _is_finished(out: Path) -> bool:
    """Whether a training has written its output, and has not begun anew."""
    return (out / MADE_BY).is_file() and not (out / UNFINISHED).is_dir()


def _content_problem(out: Path, command: str, sources: Iterable[str | Path | None]) -> str | None:
    if is_read(out, sources):
        return f"is not written into: it holds what `{command}` reads"
    maker, allowed = maker_of(out), f"only an empty directory, or one that `{command}` made, is written into"
    if maker == command:
        return None
    if maker is not None:
        return f"was made by `{maker}`: {allowed}"
    try:
        found = sorted(entry.name for entry in out.iterdir() if not _counts_for_nothing(entry))
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return f"holds {shortened(found, 3)}: {allowed}" if found else None


def _counts_for_nothing(entry: Path) -> bool:
    """Notes, locks of starts that made nothing else, and directories of these: a file system of its own is mounted
    before its first run.
    """
    name = entry.name
    if name.startswith(".") or name.endswith(_NOTES) or name in ("lock", "logs", "lost+found"):
        return True
    return entry.is_dir() and all(map(_counts_for_nothing, entry.iterdir()))


def output_file_problems(
    field: str,
    path: str | Path | None,
    begins: bytes,
    sources: Iterable[str | Path | None] = (),
    may_exist: bool = True,
) -> list[ConfigProblem]:
    """Problems with writing a file at `path` (None: nothing is to be written). Creates nothing.

    `begins`: the pattern with which a file of this command begins, uncompressed; no other file is replaced. `sources`:
    what the command reads. Missing parent directories are no problem: the commands make them. `may_exist`: whether it
    may replace a file.
    """
    if path is None:
        return []
    file = Path(path)
    if not os.path.exists(file):  # unlike Path.exists it takes every text
        return _place_problems(field, path, file.parent, True)
    allowed = ""
    if file.is_dir():
        allowed = "is a directory: name a file"
    elif not os.access(file, os.W_OK):
        allowed = "is not writable"
    elif is_read(file, sources):
        allowed = "is not replaced: this command reads it"
    elif file.is_file():  # no device, no pipe
        if not may_exist:
            allowed = "exists: --overwrite replaces it"
        elif (head := _head(file)) and not re.match(begins, head):
            allowed = "is not replaced: it does not begin as what this command writes; name another file, or remove it"
    return [ConfigProblem(field, str(path), allowed)] if allowed else []


def _head(file: Path) -> bytes:
    """The first bytes of a file, unpacked where it is gzip; something that nothing begins with if it cannot be read."""
    try:
        with file.open("rb") as stream:
            is_packed = stream.read(2) == b"\x1f\x8b"
        with gzip.open(file, "rb") if is_packed else file.open("rb") as stream:
            return stream.read(_HEAD)
    except (OSError, EOFError):
        return b"\0"


def _place_problems(field: str, shown: str | Path, directory: Path, must_be_writable: bool) -> list[ConfigProblem]:
    """Problems with making a directory, or with writing into it."""
    absolute = directory.absolute()
    try:
        if problem := container_problem(shown):
            return [ConfigProblem(field, str(shown), problem)]
        existing = next(p for p in (absolute, *absolute.parents) if os.path.lexists(p))
        if not existing.is_dir():
            return [ConfigProblem(field, str(shown), f"{existing} is not a directory")]
    except (OSError, ValueError) as error:  # ValueError: a null byte
        return [ConfigProblem(field, str(shown), f"is no path: {error}")]
    if must_be_writable and not os.access(existing, os.W_OK | os.X_OK):
        return [ConfigProblem(field, str(shown), f"{existing} is not writable")]
    return []


def same_file_problems(
    field: str, path: str | Path | None, other: str, there: str | Path | None
) -> list[ConfigProblem]:
    """Two outputs of one command in one file; None: an output that is not written."""
    if path is None or there is None or os.path.realpath(path) != os.path.realpath(there):
        return []
    return [ConfigProblem(field, str(path), f"must be another file than {other}")]
