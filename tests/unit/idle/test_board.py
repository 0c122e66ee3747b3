import pytest

from megatron_tlt.idle.board import StatusBoard
from megatron_tlt.idle.messages import Report
from megatron_tlt.idle.state import RankState

BUSY, IDLE, TRAINING = RankState.BUSY, RankState.IDLE, RankState.TRAINING


@pytest.fixture
def board():
    made = StatusBoard(range(0, 6, 2))
    made.begin(1)
    return made


def test_all_ranks_are_busy_until_they_report_being_done(board):
    assert board.busy == {0, 2, 4}
    board.update(Report(0, 1, 1, BUSY))
    board.update(Report(2, 1, 1, IDLE))
    board.update(Report(4, 1, 1, TRAINING))
    assert board.busy == {0}
    board.update(Report(2, 2, 1, BUSY))  # stolen requests
    assert board.busy == {0, 2}


def test_a_rank_that_requests_work_is_busy_and_has_no_queue(board):
    board.update(Report(0, 1, 1, BUSY, queued=3))
    board.update(Report(2, 1, 1, IDLE, is_requesting=True))
    assert board.queues() == ([board.report_of(0)], False)  # rank 4 has not reported
    board.update(Report(4, 1, 1, IDLE))
    assert board.busy == {0, 2}
    assert board.queues() == ([board.report_of(0)], True)
    board.update(Report(0, 2, 1, BUSY, queued=-1))
    assert board.queues() == ([], False)
