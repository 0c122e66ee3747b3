from dataclasses import dataclass

import pytest

from megatron_tlt.idle.board import StatusBoard
from megatron_tlt.idle.messages import Report
from megatron_tlt.idle.state import RankState

BUSY, IDLE, TRAINING = RankState.BUSY, RankState.IDLE, RankState.TRAINING


@dataclass
class Hand:
    time: float = 50.0

    def now(self) -> float:
        return self.time


@pytest.fixture
def clock():
    return Hand()


@pytest.fixture
def board(clock):
    made = StatusBoard(range(0, 6, 2), clock)
    made.begin(1)
    return made


def test_everybody_is_waited_for_until_heard_to_be_done(board):
    assert board.busy == {0, 2, 4}
    board.take(Report(0, 1, 1, BUSY), via=0)
    board.take(Report(2, 1, 1, IDLE), via=2)
    board.take(Report(4, 1, 1, TRAINING), via=2)
    assert board.busy == {0}
    assert board.waiting_vias() == {2}
    board.take(Report(2, 2, 1, BUSY), via=2)  # new work
    assert board.busy == {0, 2}


def test_the_newest_report_wins_however_it_travelled(board):
    assert board.take(Report(2, 5, 1, IDLE), via=0)
    assert not board.take(Report(2, 4, 1, BUSY), via=2)
    assert not board.take(Report(2, 5, 1, BUSY), via=2)
    assert board.entries()[1].state is IDLE
    assert board.take(Report(2, 1, 2, BUSY), via=2)  # a later window, whatever the count


def test_a_rank_in_a_later_window_is_done_with_this_one(board):
    board.take(Report(4, 9, 2, BUSY), via=4)
    assert board.busy == {0, 2}
    board.begin(2)
    assert board.busy == {0, 2, 4}


def test_the_tail_is_that_of_the_slowest_and_shrinks_with_time(board, clock):
    board.take(Report(0, 1, 1, BUSY, tokens_left=100, tokens_per_second=50), via=0)
    board.take(Report(2, 1, 1, BUSY, tokens_left=100, tokens_per_second=20), via=2)
    assert board.tail() is None  # nothing was heard of rank 4
    board.take(Report(4, 1, 1, IDLE), via=4)
    assert board.tail() == pytest.approx(5.0)
    clock.time += 6
    assert board.tail() == pytest.approx(-1.0)
    board.take(Report(2, 2, 1, IDLE), via=2)
    board.take(Report(0, 2, 1, BUSY, tokens_left=30, tokens_per_second=0), via=0)
    assert board.tail() is None
    board.take(Report(0, 3, 1, IDLE, changed_at=77.0), via=0)
    assert board.tail() == 0.0
    assert board.last_change() == 77.0


def test_the_text_names_states_and_who_is_silent_longest_first(board, clock):
    board.take(Report(0, 1, 1, BUSY, running=3, tokens_left=812), via=0)
    clock.time += 2.5
    board.take(Report(2, 1, 1, TRAINING, steps=40), via=2)
    assert board.text() == (
        "UNKNOWN: rank 4 (never heard); BUSY: rank 0 (window 1, heard 2.5 s ago, 3 requests, 812 tokens left); "
        "TRAINING: rank 2 (window 1, heard 0.0 s ago, 40 micro-steps)"
    )


def test_the_text_of_many_ranks_is_cut(clock):
    board = StatusBoard(range(100), clock)
    assert board.text().endswith("rank 15 (never heard), and 84 more")


def test_who_may_still_take_requests_over_is_waited_for_but_holds_up_nobody(board):
    board.take(Report(0, 1, 1, BUSY, tokens_left=100, tokens_per_second=50, queued=3), via=0)
    board.take(Report(2, 1, 1, IDLE, asks=True), via=2)
    assert board.queues() == ([board.entries()[0].report], False)  # rank 4 was not heard of
    board.take(Report(4, 1, 1, IDLE), via=4)
    assert board.busy == {0, 2}
    assert board.tail() == pytest.approx(2.0)
    assert board.queues() == ([board.entries()[0].report], True)
    board.take(Report(0, 2, 1, BUSY, queued=-1), via=0)
    assert board.queues() == ([], False)
    assert [board.seq_of(rank) for rank in (0, 2, 4)] == [2, 1, 1]
