"""How records are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.lib.bench_record import record_text
from tests.helpers.mpi import ROOT


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks/results").glob("*.json")), ids=lambda path: path.stem)
def test_a_record_has_a_line_for_each_row(path: Path):
    text = path.read_text()
    record = json.loads(text)
    assert text == record_text(record)
    rows = record.get("rows", [])
    assert len(text.splitlines()) == 2 + len(record) + (len(rows) + 1 if rows else 0)
