"""Idle windows on real MPI ranks: nobody leaves before the last one is done, and everybody leaves soon after."""

import json
import time

import pytest

from tests.helpers.mpi import run_ranks

pytestmark = pytest.mark.mpi
WORKER = "tests/mpi/workers/idle_ranks.py"


def run(ranks: int, *arguments: object) -> dict:
    """Figures of one scenario; its checks are in the worker."""
    out = run_ranks(ranks, WORKER, *map(str, arguments), timeout=100).stdout
    lines = [line for line in out.splitlines() if line.startswith("ok ")]
    assert len(lines) == 1, out
    return json.loads(lines[0][3:])


@pytest.mark.parametrize(("ranks", "windows"), [(1, 1), (2, 2), (4, 24), (8, 12)])
def test_ranks_finish_in_every_order(ranks, windows):
    assert run(ranks, "orders")["windows"] == windows


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_all_finish_at_once(ranks):
    run(ranks, "at_once")


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_one_is_never_idle_and_the_others_train_the_whole_time(ranks):
    figures = run(ranks, "never_idle")
    assert len(figures["trained_share"]) == 2


@pytest.mark.parametrize(("ranks", "windows"), [(2, 2000), (4, 500), (8, 150)])
def test_windows_leave_nothing_behind(ranks, windows):
    assert run(ranks, "leak", windows)["windows"] == windows


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_drafter_that_fails_on_one_rank_ends_its_training_there_only(ranks):
    out = run_ranks(ranks, WORKER, "raises", timeout=100).stdout
    assert "ok {}" in out
    assert out.count("drafter training is off for the rest of the run: loss is nan") == 1


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_everybody_is_out_one_micro_step_after_the_last_is_done(ranks):
    """A barrier alone takes up to log2(ranks) micro-steps; three ranks are not a power of two."""
    run(ranks, "slow_step")


@pytest.mark.parametrize("per_node", [2, 4])
def test_reports_go_through_the_first_rank_of_each_node(per_node):
    run(8, "sub_leaders", per_node)


@pytest.mark.parametrize(("ranks", "per_node"), [(2, 2), (4, 2), (8, 4)])
def test_requests_go_to_ranks_that_are_dry(ranks, per_node):
    figures = run(ranks, "takes_over", per_node)
    assert figures["taken"] > 0


def test_a_leader_that_does_not_poll_finds_the_newest_reports_not_all():
    assert run(4, "deaf_leader")["outstanding"] == 1


def test_calls_out_of_order_are_refused():
    run(2, "protocol")


@pytest.mark.parametrize("state", ["BUSY", "IDLE", "TRAINING"])
def test_a_rank_that_is_killed_ends_the_job_and_the_board_shows_its_last_state(state):
    started = time.monotonic()
    done = run_ranks(4, WORKER, "dies", state, "SIGKILL", "600", check=False, timeout=60)
    assert done.returncode != 0
    assert time.monotonic() - started < 30
    board = [line for line in done.stdout.splitlines() if line.startswith("board: ")][-1]
    assert "rank 1 (" in group_of(board, state), board


@pytest.mark.parametrize("state", ["BUSY", "IDLE", "TRAINING"])
def test_a_rank_that_hangs_ends_the_job_and_is_named_with_its_state(state):
    """As under a launcher that lets the others live: nothing is heard of rank 1 any more."""
    done = run_ranks(4, WORKER, "dies", state, "SIGSTOP", "1.5", check=False, timeout=60)
    assert done.returncode != 0
    said = done.stdout[done.stdout.index("CoordinatorError: nothing was heard of rank 1 for 1.5 s") :]
    assert "rank 1 (" in group_of(said, state), said


def group_of(board: str, state: str) -> str:
    """The part of a board's text that lists the ranks in `state`."""
    return board.split(f"{state}: ", 1)[1].split("; ", 1)[0]


@pytest.mark.parametrize("how", ["steps", "fails"])
def test_ranks_of_a_replica_train_as_one(how):
    assert "ok" in run_ranks(4, "tests/mpi/workers/idle_units.py", how, timeout=120).stdout
