"""Idle windows on real MPI ranks: no rank leaves before the last one is done, and all leave soon after."""

import json
import time

import pytest

from tests.helpers.mpi import run_ranks

pytestmark = pytest.mark.mpi
WORKER = "tests/mpi/workers/idle_ranks.py"
MANY = ["orders", "at_once", "never_idle", "slow_step", "steals"]
SCENARIOS = {
    1: ["orders", "at_once"],
    2: [*MANY, "leak:2000", "raises"],
    3: ["slow_step"],  # not a power of two: a barrier alone takes up to log2(ranks) micro-steps
    4: [*MANY, "leak:500", "raises", "slow_leader"],
    8: [*MANY, "leak:150"],
}


@pytest.mark.parametrize("ranks", SCENARIOS)
def test_windows(ranks):
    """The checks are in the worker's scenarios."""
    out = run_ranks(ranks, WORKER, *SCENARIOS[ranks], timeout=200).stdout
    lines = [line.split(" ", 2)[1:] for line in out.splitlines() if line.startswith("ok ")]
    figures = {name: json.loads(text) for name, text in lines}
    assert list(figures) == [scenario.split(":")[0] for scenario in SCENARIOS[ranks]]
    assert out.count("drafter training is off for the rest of the run: loss is nan") == ("raises" in figures)
    if "steals" in figures:
        assert figures["steals"]["stolen"] > 0
    if "slow_leader" in figures:
        assert figures["slow_leader"]["outstanding"] == 1


# The state in which rank 1 dies or stops; SIGSTOP is like a launcher that does not kill the other ranks.
FAULTS = [("SIGKILL", "BUSY"), ("SIGSTOP", "TRAINING")]
MORE = [("SIGKILL", "IDLE"), ("SIGKILL", "TRAINING"), ("SIGSTOP", "BUSY"), ("SIGSTOP", "IDLE")]


@pytest.mark.parametrize(
    ("number", "state"), [*FAULTS, *(pytest.param(*more, marks=pytest.mark.nightly) for more in MORE)]
)
def test_a_rank_that_dies_or_hangs_ends_the_job_and_the_board_shows_its_last_state(number, state):
    silent = 600 if number == "SIGKILL" else 1.5
    started = time.monotonic()
    done = run_ranks(4, WORKER, f"dies:{state}:{number}:{silent}", check=False, timeout=60)
    assert done.returncode != 0
    assert time.monotonic() - started < 30
    if number == "SIGKILL":
        board = [line for line in done.stdout.splitlines() if line.startswith("board: ")][-1]
    else:
        board = done.stdout[done.stdout.index("CoordinatorError: nothing was heard of rank 1 for 1.5 s") :]
    assert "rank 1 (" in group_of(board, state), board


def group_of(board: str, state: str) -> str:
    """The part of a board's text that lists the ranks in `state`."""
    return board.split(f"{state}: ", 1)[1].split("; ", 1)[0]


def test_ranks_of_a_tensor_parallel_group_train_together():
    assert "ok" in run_ranks(4, "tests/mpi/workers/idle_groups.py", timeout=120).stdout
