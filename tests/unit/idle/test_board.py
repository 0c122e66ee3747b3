import pytest

from megatron_tlt.idle.board import StatusBoard
from megatron_tlt.idle.messages import Report
from megatron_tlt.idle.state import RankState
from tests.helpers.fake_mpi import Clock

BUSY, IDLE, TRAINING = RankState.BUSY, RankState.IDLE, RankState.TRAINING


@pytest.fixture
def clock():
    return Clock(50.0)


@pytest.fixture
def board(clock):
    made = StatusBoard(range(0, 6, 2), clock)
    made.begin(1)
    return made


def test_all_ranks_are_busy_until_they_report_being_done(board):
    assert board.busy == {0, 2, 4}
    board.update(Report(0, 1, 1, BUSY))
    board.update(Report(2, 1, 1, IDLE))
    board.update(Report(4, 1, 1, TRAINING))
    assert board.busy == {0}
    assert board.idle_ranks() == [2, 4]
    board.update(Report(2, 2, 1, BUSY))  # stolen requests
    assert board.busy == {0, 2}


def test_the_expected_wait_is_that_of_the_slowest_and_shrinks_with_time(board, clock):
    board.update(Report(0, 1, 1, BUSY, tokens_left=100, tokens_per_second=50))
    board.update(Report(2, 1, 1, BUSY, tokens_left=100, tokens_per_second=20))
    assert board.expected_wait() is None  # rank 4 has not reported
    board.update(Report(4, 1, 1, IDLE))
    assert board.expected_wait() == pytest.approx(5.0)
    clock.time += 6
    assert board.expected_wait() == pytest.approx(-1.0)
    board.update(Report(2, 2, 1, IDLE))
    board.update(Report(0, 2, 1, BUSY, tokens_left=30, tokens_per_second=0))
    assert board.expected_wait() is None
    board.update(Report(0, 3, 1, IDLE, changed_at=77.0))
    assert board.expected_wait() == 0.0
    assert board.last_change() == 77.0


def test_a_rank_that_requests_work_is_busy_but_does_not_count_for_the_wait(board):
    board.update(Report(0, 1, 1, BUSY, tokens_left=100, tokens_per_second=50, queued=3))
    board.update(Report(2, 1, 1, IDLE, is_requesting=True))
    assert board.queues() == ([board.report_of(0)], False)  # rank 4 has not reported
    board.update(Report(4, 1, 1, IDLE))
    assert board.busy == {0, 2}
    assert board.expected_wait() == pytest.approx(2.0)
    assert board.queues() == ([board.report_of(0)], True)
    board.update(Report(0, 2, 1, BUSY, queued=-1))
    assert board.queues() == ([], False)
