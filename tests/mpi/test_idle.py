"""Idle windows on real MPI ranks: no rank leaves before the last one is done, and all leave soon after."""

import pytest

from tests.helpers.mpi import run_ranks

pytestmark = pytest.mark.mpi
WORKER = "tests/mpi/workers/idle_ranks.py"
SCENARIOS = {
    2: ["orders"],
    # Not a power of two: a barrier alone takes up to log2(ranks) micro-steps.
    3: ["orders", "slow_step"],
    8: ["orders"],
}


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(8, marks=pytest.mark.nightly)])
def test_windows(ranks):
    """The checks are in the worker's scenarios."""
    out = run_ranks(ranks, WORKER, *SCENARIOS[ranks], timeout=200).stdout
    assert [line.split()[1] for line in out.splitlines() if line.startswith("ok ")] == SCENARIOS[ranks]
