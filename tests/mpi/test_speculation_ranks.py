"""Speculation on one engine sharded over MPI ranks: all ranks agree, and with plain decoding of the same ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.mpi import run_ranks

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_sharded_engine_speculates(tmp_path: Path, ranks: int):
    """Equal bits: sums over ranks are taken in one order whatever the rows, and rank 0 decides for all."""
    file = tmp_path / "results.json"
    run_ranks(ranks, "tests/mpi/workers/speculation_ranks.py", str(file))
    results = json.loads(file.read_text())
    plain = results.pop("none")["answers"]
    for name, case in results.items():
        assert case["answers"] == plain, name
        assert case["accept_length"] >= 1.0 or name in ("suffix", "hybrid"), name
