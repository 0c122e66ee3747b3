"""Idle windows on real MPI ranks: no rank leaves before the last one is done, and all leave soon after."""

import json

import pytest

from tests.helpers.mpi import run_ranks

pytestmark = pytest.mark.mpi
WORKER = "tests/mpi/workers/idle_ranks.py"
SCENARIOS = {
    2: ["orders", "steals", "leak:1000"],
    # Not a power of two: a barrier alone takes up to log2(ranks) micro-steps.
    3: ["orders", "never_idle", "slow_step", "steals"],
    8: ["orders", "steals", "leak:150"],
}


@pytest.mark.parametrize("ranks", SCENARIOS)
def test_windows(ranks):
    """The checks are in the worker's scenarios."""
    out = run_ranks(ranks, WORKER, *SCENARIOS[ranks], timeout=200).stdout
    lines = [line.split(" ", 2)[1:] for line in out.splitlines() if line.startswith("ok ")]
    figures = {name: json.loads(text) for name, text in lines}
    assert list(figures) == [scenario.split(":")[0] for scenario in SCENARIOS[ranks]]
    assert figures["steals"]["stolen"] > 0
