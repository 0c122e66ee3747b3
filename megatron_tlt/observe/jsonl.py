"""JSON lines that survive a crash: whole lines only, broken ones skipped, cut back on resume. Torch-free."""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from megatron_tlt.observe.files import naming

JsonRow = dict[str, Any]
SkippedLines = dict[Path, set[int]]
"""Numbers, from 1, of the lines of each file that could not be read."""


def to_line(row: Mapping[str, Any]) -> str:
    """One line with its end. Numbers that JSON lacks (nan, inf) become null."""
    return json.dumps(to_json(row), ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def to_json(value: Any) -> Any:
    """The value as json can write it: nan and inf as None, numpy and torch values as lists, the rest as text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if hasattr(value, "tolist"):
        return to_json(value.tolist())
    return str(value)


class LineFile(FileIO):
    """Appends lines to a file in single writes, so that a crash tears at most the last one."""

    def __init__(self, path: Path):
        """Opens or creates `path` and its directory. Ends a torn last line: the next one stands alone."""
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path, "a+")
        if size := self.seek(0, os.SEEK_END):
            self.seek(size - 1)
            if self.read(1) != b"\n":
                self.write(b"\n")

    def write_lines(self, lines: Iterable[str]) -> None:
        """Appends complete lines."""
        data = "".join(lines).encode()
        with naming(os.fsdecode(self.name)):
            while data:
                data = data[self.write(data) :]


class StepFile(LineFile):
    """A file with rows by step, ascending. A resumed run drops the rows after the step that it continues from."""

    def __init__(self, path: Path, start_step: int = 0):
        """Opens or creates `path`; with `start_step` 0 without its rows."""
        cut_back(path, start_step)
        super().__init__(path)

    def write_rows(self, step: int, *rows: Mapping[str, Any]) -> None:
        """Appends rows of a step; at once on disk."""
        self.write_lines(to_line({"step": step, **row}) for row in rows)


def read_rows(
    path: Path,
    skipped: SkippedLines | None = None,
    is_valid: Callable[[JsonRow], bool] = bool,
    is_other: Callable[[bytes], bool] | None = None,
) -> Iterator[JsonRow]:
    """The rows of a file; nothing if there is no file.

    Lines that hold no JSON object, or one that is not valid, are left out; their numbers are added to `skipped`. Lines
    for which `is_other` is true are left out without being parsed.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if is_other is not None and is_other(line):
                continue
            row = _row(line)
            if row is not None and is_valid(row):
                yield row
            elif skipped is not None and line.strip():
                skipped.setdefault(path, set()).add(number)


def rows_from_end(path: Path) -> Iterator[tuple[int, JsonRow]]:
    """(Its end in bytes, row) of a file's readable rows, the last one first. Reads only as far back as it is asked to:
    a rank's responses have many GB.
    """
    with naming(path), path.open("rb") as file:
        if not (end := file.seek(0, os.SEEK_END)):
            return
        with mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as data:
            while end:
                begin = data.rfind(b"\n", 0, end - 1) + 1
                if row := _row(data[begin:end]):
                    yield end, row
                end = begin


def _row(line: bytes) -> JsonRow | None:
    try:
        row = json.loads(line)
    except ValueError:  # of JSON or of UTF-8
        return None
    return row if isinstance(row, dict) else None


def rank_file(directory: Path, rank: int) -> Path:
    """The file of a rank's rows."""
    return directory / f"rank-{rank:05d}.jsonl"


def cut_back(path: Path, start_step: int) -> None:
    """Prepares a `StepFile` for a run that continues after `start_step` steps: truncates it behind the last row of a
    step that is done. With 0 the run is a new one and all rows are removed.
    """
    if path.is_file():
        rows = rows_from_end(path) if start_step else ()
        os.truncate(path, next((end for end, row in rows if (row.get("step") or 0) <= start_step), 0))


def cut_back_ranks(
    directory: Path, num_ranks: int, start_step: int, cut: Callable[[Path, int], None] = cut_back
) -> None:
    """`cut` of the files of ranks from `num_ranks` on, which an earlier start had; a new run removes them."""
    for file in directory.glob("rank-*.jsonl"):
        if file.stem >= rank_file(directory, num_ranks).stem:
            if start_step:
                cut(file, start_step)
            else:
                file.unlink()
