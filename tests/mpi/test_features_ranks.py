"""Hidden states of one engine sharded over MPI ranks: every rank emits all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.mpi import run_ranks

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("ranks", [2])
def test_ranks_emit_the_states_of_a_plain_pass(tmp_path: Path, ranks: int):
    """Bit for bit on every rank and whatever is drafted: sums over ranks are taken in one order for any rows."""
    file = tmp_path / "results.json"
    run_ranks(ranks, "tests/mpi/workers/features_ranks.py", str(file))
    results = json.loads(file.read_text())
    assert set(results) == {"native plain", "native chain", "native tree", "torch plain", "torch tree"}
    for name, case in results.items():
        assert case["chunks"] > 5, name
        assert case["preemptions"] > 0, name
        assert case["ranks_agree"], name
        assert case["off_plain_pass"] == 0.0 or (
            name.startswith("torch") and case["off_plain_pass"] < 1e-4
        ), name
        assert case["off_one_rank"] < 1e-4, name
