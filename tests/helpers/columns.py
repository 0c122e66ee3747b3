"""The columns of metrics.jsonl that docs/reference/metrics.md has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from tests.helpers.mpi import ROOT

PAGE = ROOT / "docs/reference/metrics.md"
_VARIABLE = {"NNN": r"\d+", "PHASE": r"[a-z_]+", "K": r"\d+", "N": r"\d+"}  # parts of a name that a run fills in


def documented() -> list[str]:
    """The names in the first cells of the page's tables."""
    cells = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def undocumented(names: Iterable[str]) -> list[str]:
    """Those of `names` that the page does not have."""
    parts = re.compile("|".join(sorted(_VARIABLE, key=len, reverse=True)))
    patterns = [parts.sub(lambda found: _VARIABLE[found[0]], re.escape(name)) for name in documented()]
    page = re.compile("|".join(patterns))
    return sorted({name for name in names if not page.fullmatch(name)})


def undocumented_of(rows: Iterable[Mapping[str, object]]) -> list[str]:
    """Columns of a run's rows that the page does not have."""
    return undocumented(name for row in rows for name in row)
