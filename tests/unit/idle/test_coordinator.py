"""One rank's coordinator with a communicator of lists: which messages it sends, and what received ones change."""

import pytest

from megatron_tlt.config.idle import IdleSection
from megatron_tlt.idle.coordinator import IdleCoordinator
from megatron_tlt.idle.messages import Kind, Message, Report
from megatron_tlt.idle.state import RankState
from tests.helpers.fake_mpi import Clock, FakeComm

BUSY, IDLE = RankState.BUSY, RankState.IDLE


@pytest.fixture
def clock():
    return Clock()


def make(rank, size, clock, **options):
    comm = FakeComm(rank, size)
    return comm, IdleCoordinator(comm, IdleSection(), clock=clock.now, wall=lambda: 1e9 + clock.time, **options)


def receive(comm, clock, coordinator, *messages: Message) -> None:
    """The messages have arrived at the next poll."""
    comm.inbox += messages
    clock.time += 0.01
    coordinator.poll()


def report(rank, seq, epoch, state, **more) -> Message:
    return Message(Kind.REPORT, rank, epoch, report=Report(rank, seq, epoch, state, **more))


class Queue:
    """A queue of a length that is set by hand."""

    length = 0

    def num_queued(self):
        return self.length


def test_a_rank_reports_transitions_and_a_queue_that_changed_by_a_fifth(clock):
    queue = Queue()
    comm, coordinator = make(2, 4, clock, queue=queue)
    coordinator.begin()
    for queue.length in (1000, 900, 801, 800, 700, 640):
        coordinator.progress()
    coordinator.enter_done()
    sent = comm.take_sent()
    assert {to for to, _ in sent} == {0}
    reports = [m.report for _, m in sent]
    busy = [(BUSY, queued) for queued in (-1, 1000, 800, 640)]
    assert [(r.state, r.queued) for r in reports] == [*busy, (IDLE, 0)]
    assert [r.seq for r in reports] == [1, 2, 3, 4, 5]
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
