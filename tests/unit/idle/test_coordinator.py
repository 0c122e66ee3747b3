"""One rank's coordinator with a communicator of lists: which messages it sends, and what received ones change."""

import pytest

from megatron_tlt.config.idle import IdleSection
from megatron_tlt.errors import CoordinatorError
from megatron_tlt.idle.coordinator import IdleCoordinator
from megatron_tlt.idle.messages import Kind, Message, Report
from megatron_tlt.idle.state import RankState
from tests.helpers.fake_mpi import Clock, FakeComm

BUSY, IDLE, TRAINING = RankState.BUSY, RankState.IDLE, RankState.TRAINING


@pytest.fixture
def clock():
    return Clock()


def make(rank, size, clock, **options):
    comm = FakeComm(rank, size)
    return comm, IdleCoordinator(comm, IdleSection(), clock=clock, wall=lambda: 1e9 + clock.time, **options)


def receive(comm, clock, coordinator, *messages: Message) -> None:
    """The messages have arrived at the next poll."""
    comm.inbox += [message.pack() for message in messages]
    clock.time += 0.01
    coordinator.poll()


def report(rank, seq, epoch, state, **more) -> Message:
    return Message(Kind.REPORT, rank, epoch, report=Report(rank, seq, epoch, state, **more))


def test_a_rank_reports_transitions_and_changes_of_a_fifth(clock):
    comm, coordinator = make(2, 4, clock)
    coordinator.begin()
    for left in (1000, 900, 801, 800, 700, 640):
        coordinator.progress(left, 50.0)
    coordinator.enter_done()
    coordinator.set_state(TRAINING)
    sent = comm.take_sent()
    assert {to for to, _ in sent} == {0}
    reports = [m.report for _, m in sent]
    busy = [(BUSY, left) for left in (0, 1000, 800, 640)]
    assert [(r.state, r.tokens_left) for r in reports] == [*busy, (IDLE, 0), (TRAINING, 0)]
    assert [r.seq for r in reports] == [1, 2, 3, 4, 5, 6]
    assert {r.epoch for r in reports} == {1}


def test_messages_of_an_earlier_window_are_dropped(clock):
    comm, coordinator = make(0, 2, clock)
    for _ in range(3):
        coordinator.begin()
        coordinator.enter_done()
        comm.barriers[-1].complete = True
        assert coordinator.test_done()
    coordinator.begin()
    stale = [report(1, 99, 3, IDLE), Message(Kind.ALL_DONE, 1, 3, 7.0), Message(Kind.LAST_BUSY, 1, 3)]
    receive(comm, clock, coordinator, *stale)
    assert not coordinator.is_over
    assert coordinator.last_done_at is None
    assert coordinator._board.report_of(1) is None
    receive(comm, clock, coordinator, report(1, 1, 4, IDLE))
    assert coordinator._board.report_of(1).state is IDLE


def test_rank_0_sends_idle_ranks_the_expected_wait_and_again_when_it_moved(clock):
    comm, coordinator = make(0, 3, clock)
    coordinator.begin()
    coordinator.progress(100.0, 50.0)
    receive(comm, clock, coordinator, report(1, 1, 1, IDLE), report(2, 1, 1, BUSY))
    assert comm.take_sent() == []  # rank 2's speed is not known
    receive(comm, clock, coordinator, report(2, 2, 1, BUSY, tokens_left=400, tokens_per_second=100))
    ((to, message),) = comm.take_sent()
    assert (to, message.kind) == (1, Kind.EXPECTED_WAIT)
    assert message.value == pytest.approx(4.0)
    clock.time += 1.0
    coordinator.poll()
    receive(comm, clock, coordinator, report(2, 3, 1, BUSY, tokens_left=300, tokens_per_second=100))
    assert comm.take_sent() == []  # as expected
    receive(comm, clock, coordinator, report(2, 4, 1, BUSY, tokens_left=600, tokens_per_second=100))
    ((to, message),) = comm.take_sent()
    assert (to, message.value) == (1, pytest.approx(6.0))


def test_the_last_busy_rank_is_named_and_announces_the_end(clock):
    comm, coordinator = make(0, 4, clock, group_size=2)
    coordinator.begin()
    coordinator.enter_done()
    ((to, message),) = comm.take_sent()  # of the groups 0-1 and 2-3 the second is left
    assert (to, message.kind) == (2, Kind.LAST_BUSY)

    comm, last = make(2, 4, clock, group_size=2)
    last.begin()
    receive(comm, clock, last, Message(Kind.LAST_BUSY, 0, 1))
    comm.take_sent()
    clock.time += 1
    last.enter_done()
    sent = [(to, m.value) for to, m in comm.take_sent() if m.kind is Kind.ALL_DONE]
    assert sent == [(0, 1e9 + clock.time), (1, 1e9 + clock.time), (3, 1e9 + clock.time)]
    assert last.is_over
    assert not last.test_done()  # the barrier alone ends the window


def test_groups_must_fill_the_world_and_reports_go_to_rank_0(clock):
    with pytest.raises(CoordinatorError, match=r"group_size = 3 must divide the number of ranks \(4\)"):
        make(0, 4, clock, group_size=3)
    comm, coordinator = make(1, 4, clock)
    coordinator.begin()
    with pytest.raises(CoordinatorError, match="rank 2 reported to rank 1"):
        receive(comm, clock, coordinator, report(2, 1, 1, BUSY))
