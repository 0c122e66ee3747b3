"""JSON lines that survive a crash: whole lines only, torn tails ignored, cut back on resume. Torch-free."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any


def to_line(row: Mapping[str, Any]) -> str:
    """One line with its end. Numbers that JSON does not know (nan, inf) become null."""
    return json.dumps(_plain(row), ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def _plain(value: Any) -> Any:
    """What json can write: numpy and torch scalars through `item()`, paths and the rest as text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return str(value)


class LineFile:
    """Appends lines to a file in single writes, so that a crash tears at most the last one."""

    def __init__(self, path: Path):
        """Opens or creates `path` and its directory. Ends a torn last line: the next one stands alone."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")

    @property
    def is_open(self) -> bool:
        """Whether `close` was not called yet."""
        return self._fd >= 0

    def write(self, lines: Iterable[str]) -> None:
        """Appends complete lines."""
        data = "".join(lines).encode()
        while data:
            data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self.is_open:
            os.close(self._fd)
            self._fd = -1


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, without torn or empty lines; nothing if there is no file."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict):
                yield row


def write_atomically(path: Path, lines: Iterable[str]) -> None:
    """Writes lines to a neighbour and renames it: readers see the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with scratch.open("w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def cut_back(path: Path, start_step: int) -> int:
    """Prepares a file for a run that goes on after `start_step` steps: later rows and torn lines go.

    With 0 the run is a new one, so everything goes. Returns how many rows went. Replaces the file at once.
    """
    if not path.exists():
        return 0
    rows = list(read_rows(path))
    kept = [row for row in rows if start_step and row.get("step", 0) <= start_step]
    write_atomically(path, (to_line(row).rstrip("\n") for row in kept))
    return len(rows) - len(kept)
