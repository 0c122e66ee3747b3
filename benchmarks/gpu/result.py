"""What a part of `gpu_check.py` finds, written as it comes. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

Row = dict[str, Any]


@dataclass
class Result:
    """What a part found so far. `failures`: figures that must not be as they are.

    Each addition is a line of JSON in `file`, so that a part that is killed keeps what it had found: a row, figures of
    the summary, or a failure.
    """

    file: TextIO | None = None
    rows: list[Row] = field(default_factory=list)
    summary: dict[str, float | str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add_row(self, row: Row) -> None:
        """Adds a row of the part's table."""
        self.rows.append(row)
        self._write({"row": row})

    def note(self, figures: Mapping[str, float | str]) -> None:
        """Adds figures to the summary."""
        self.summary |= figures
        self._write({"summary": figures})

    def fail(self, text: str) -> None:
        """Adds a failure."""
        self.failures.append(text)
        self._write({"failure": text})

    def take(self, line: str) -> None:
        """Adds what a line of another result's file says."""
        found = json.loads(line)
        if "row" in found:
            self.add_row(found["row"])
        if "summary" in found:
            self.note(found["summary"])
        if "failure" in found:
            self.fail(found["failure"])

    def _write(self, found: Mapping[str, Any]) -> None:
        if self.file is not None:
            print(json.dumps(found), file=self.file, flush=True)
