"""One rank's coordinator with a communicator made of lists: what it sends, and what it makes of what comes."""

from dataclasses import dataclass, field

import pytest

from megatron_tlt.errors import CoordinatorError
from megatron_tlt.idle.coordinator import IdleCoordinator
from megatron_tlt.idle.messages import Kind, Message, Report, pack, unpack
from megatron_tlt.idle.state import RankState
from tests.helpers.fake_mpi import Done

BUSY, IDLE, TRAINING = RankState.BUSY, RankState.IDLE, RankState.TRAINING


@dataclass
class Barrier:
    complete: bool = False

    def Test(self) -> bool:
        return self.complete


@dataclass
class FakeComm:
    rank: int
    size: int
    inbox: list = field(default_factory=list)
    sent: list = field(default_factory=list)
    barriers: list = field(default_factory=list)
    misses: int = 0  # before the next message shows, as MPI has it

    def Dup(self) -> "FakeComm":
        return self

    def Free(self) -> None:
        self.sent.append("freed")

    def Isend(self, data: bytearray, dest: int) -> Done:
        self.sent.append((dest, unpack(data)))
        return Done()

    def Improbe(self) -> Done | None:
        if self.misses:
            self.misses -= 1
            return None
        return Done(self.inbox.pop(0)) if self.inbox else None

    def Ibarrier(self) -> Barrier:
        self.barriers.append(Barrier())
        return self.barriers[-1]

    def take_sent(self) -> list[tuple[int, Message]]:
        taken, self.sent = self.sent, []
        return taken


@dataclass
class Hand:
    time: float = 0.0

    def now(self) -> float:
        return self.time


@pytest.fixture
def clock():
    return Hand()


def make(rank, size, clock, **options):
    comm = FakeComm(rank, size)
    coordinator = IdleCoordinator(
        comm, clock=clock, wall=lambda: 1e9 + clock.time, min_poll_seconds=0.002, **options
    )
    return comm, coordinator


def come(comm, clock, coordinator, *messages: bytearray) -> None:
    """The messages are there at the next look."""
    comm.inbox += messages
    clock.time += 0.01
    coordinator.poll()


def report(rank, seq, epoch, state, **more) -> bytearray:
    return pack(Kind.REPORT, rank, epoch, reports=[Report(rank, seq, epoch, state, **more)])


def test_a_rank_reports_transitions_and_changes_of_a_fifth(clock):
    comm, coordinator = make(2, 4, clock)
    coordinator.begin()
    for left in (1000, 900, 801, 800, 700, 640):
        coordinator.progress(3, left, 50.0)
    coordinator.enter_done()
    coordinator.tell(TRAINING)
    sent = comm.take_sent()
    assert {to for to, _ in sent} == {0}
    told = [m.reports[0] for _, m in sent]
    assert [(r.state, r.tokens_left) for r in told] == [
        (BUSY, 0),
        (BUSY, 1000),
        (BUSY, 800),
        (BUSY, 640),
        (IDLE, 0),
        (TRAINING, 0),
    ]
    assert [r.seq for r in told] == [1, 2, 3, 4, 5, 6]
    assert {r.epoch for r in told} == {1}


def test_nothing_new_is_said_by_a_heartbeat(clock):
    comm, coordinator = make(1, 2, clock, heartbeat_seconds=1.0)
    coordinator.begin()
    comm.take_sent()
    for _ in range(250):
        clock.time += 0.01
        coordinator.poll()
    assert len(comm.take_sent()) == 2


def test_a_look_right_after_the_last_asks_nothing(clock):
    comm, coordinator = make(1, 2, clock)
    coordinator.begin()
    clock.time += 0.01
    coordinator.poll()
    comm.inbox.append(pack(Kind.OVER, 0, 1, 5.0))
    clock.time += 0.001
    coordinator.poll()
    assert len(comm.inbox) == 1 and not coordinator.is_over
    clock.time += 0.001
    coordinator.poll()
    assert coordinator.is_over and coordinator.last_done_at == 5.0


def test_a_look_outlasts_several_misses(clock):
    comm, coordinator = make(1, 2, clock)
    coordinator.begin()
    comm.misses = 7
    come(comm, clock, coordinator, pack(Kind.OVER, 0, 1, 5.0))
    assert coordinator.is_over


def test_messages_of_an_earlier_window_are_dropped(clock):
    comm, coordinator = make(0, 2, clock)
    for _ in range(3):
        coordinator.begin()
        coordinator.enter_done()
        comm.barriers[-1].complete = True
        assert coordinator.all_done()
    coordinator.begin()
    stale = [report(1, 99, 3, IDLE), pack(Kind.OVER, 1, 3, 7.0), pack(Kind.LAST, 1, 3)]
    come(comm, clock, coordinator, *stale)
    assert not coordinator.is_over
    assert coordinator.last_done_at is None
    assert coordinator.board()[1].report is None
    come(comm, clock, coordinator, report(1, 1, 4, IDLE))
    assert coordinator.board()[1].state is IDLE


def test_a_stale_tail_or_last_moves_nobody(clock):
    comm, coordinator = make(1, 2, clock)
    for _ in range(2):
        coordinator.begin()
        come(comm, clock, coordinator, pack(Kind.LAST, 0, 1), pack(Kind.TAIL, 0, 1, 3.0))
        comm.take_sent()
        if coordinator.epoch == 1:
            assert coordinator.expected_tail() == pytest.approx(3.0)
            coordinator.enter_done()
            comm.barriers[-1].complete = True
            assert coordinator.all_done()
    assert coordinator.expected_tail() is None
    coordinator.enter_done()
    assert not coordinator.is_over
    assert [m.kind for _, m in comm.take_sent()] == [Kind.REPORT]


def test_rank_0_tells_idle_ranks_the_tail_and_again_when_it_moved(clock):
    comm, coordinator = make(0, 3, clock)
    coordinator.begin()
    coordinator.progress(2, 100.0, 50.0)
    come(comm, clock, coordinator, report(1, 1, 1, IDLE), report(2, 1, 1, BUSY))
    assert comm.take_sent() == []  # rank 2's speed is not known
    come(comm, clock, coordinator, report(2, 2, 1, BUSY, tokens_left=400, tokens_per_second=100))
    ((to, message),) = comm.take_sent()
    assert (to, message.kind) == (1, Kind.TAIL)
    assert message.value == pytest.approx(4.0)
    clock.time += 1.0
    coordinator.poll()
    come(comm, clock, coordinator, report(2, 3, 1, BUSY, tokens_left=300, tokens_per_second=100))
    assert comm.take_sent() == []  # as expected
    come(comm, clock, coordinator, report(2, 4, 1, BUSY, tokens_left=600, tokens_per_second=100))
    ((to, message),) = comm.take_sent()
    assert (to, message.value) == (1, pytest.approx(6.0))


def test_the_one_that_all_wait_for_is_told_and_says_when_it_is_done(clock):
    comm, coordinator = make(0, 4, clock, unit_size=2)
    coordinator.begin()
    coordinator.enter_done()
    ((to, message),) = comm.take_sent()  # of the units 0-1 and 2-3 the second is left
    assert (to, message.kind) == (2, Kind.LAST)

    comm, last = make(2, 4, clock, unit_size=2)
    last.begin()
    come(comm, clock, last, pack(Kind.LAST, 0, 1))
    comm.take_sent()
    clock.time += 1
    last.enter_done()
    said = [(to, m.value) for to, m in comm.take_sent() if m.kind is Kind.OVER]
    assert said == [(0, 1e9 + clock.time), (1, 1e9 + clock.time), (3, 1e9 + clock.time)]
    assert last.is_over
    assert not last.all_done()  # the barrier alone lets it go


def test_rank_0_says_that_it_is_over_when_its_board_does(clock):
    comm, coordinator = make(0, 3, clock)
    coordinator.begin()
    coordinator.enter_done()
    last = report(2, 1, 1, IDLE, changed_at=2e9)
    come(comm, clock, coordinator, report(1, 1, 1, TRAINING), last)
    said = [(to, m.value) for to, m in comm.take_sent() if m.kind is Kind.OVER]
    assert said == [(1, 2e9), (2, 2e9)]


def test_who_finds_the_barrier_complete_at_the_door_was_the_last(clock):
    comm, coordinator = make(3, 4, clock)
    coordinator.begin()
    comm.Ibarrier = lambda: Barrier(complete=True)
    coordinator.enter_done()
    assert [to for to, m in comm.take_sent() if m.kind is Kind.OVER] == [0, 1, 2]
    assert coordinator.all_done()


def test_a_sub_leader_sends_on_what_is_new_in_one_message(clock):
    comm, coordinator = make(4, 8, clock, sub_leaders_above=4, ranks_per_node=4)
    coordinator.begin()
    comm.take_sent()
    news = [report(5, 1, 1, BUSY), report(6, 1, 1, BUSY), report(6, 2, 1, IDLE)]
    come(comm, clock, coordinator, *news)
    ((to, message),) = comm.take_sent()
    assert (to, message.kind) == (0, Kind.REPORT)
    assert [(r.rank, r.state) for r in message.reports] == [(5, BUSY), (6, IDLE)]
    come(comm, clock, coordinator, pack(Kind.TAIL, 0, 1, 9.0))
    clock.time += 0.1
    coordinator.poll()
    ((to, message),) = comm.take_sent()
    assert (to, message.kind) == (6, Kind.TAIL)
    assert message.value == pytest.approx(9.0 - 0.1)

    comm, member = make(6, 8, clock, sub_leaders_above=4, ranks_per_node=4)
    member.begin()
    assert [to for to, _ in comm.take_sent()] == [4]


def test_silent_ranks_are_named(clock):
    comm, coordinator = make(0, 3, clock)
    coordinator.begin()
    come(comm, clock, coordinator, report(1, 1, 1, BUSY), report(2, 1, 1, IDLE))
    for _ in range(6):
        clock.time += 1
        come(comm, clock, coordinator, report(1, int(clock.time) + 1, 1, BUSY))
        coordinator.check_alive(10.0)
    clock.time += 5
    come(comm, clock, coordinator, report(1, 50, 1, BUSY))
    with pytest.raises(
        CoordinatorError, match=r"nothing was heard of rank 2 for 10 s; last seen: .*IDLE: rank 2"
    ):
        coordinator.check_alive(10.0)


def test_outside_a_window_progress_says_nothing(clock):
    comm, coordinator = make(1, 2, clock)
    coordinator.progress(3, 500.0, 10.0)
    assert comm.sent == []
    coordinator.close()
    assert comm.sent == ["freed"]


def test_a_window_that_is_open_keeps_its_communicator(clock):
    comm, coordinator = make(1, 2, clock)
    coordinator.begin()
    coordinator.enter_done()
    comm.take_sent()
    coordinator.close()
    assert comm.sent == []


def test_units_must_fill_the_world(clock):
    with pytest.raises(CoordinatorError, match=r"unit_size = 3 must divide the number of ranks \(4\)"):
        make(0, 4, clock, unit_size=3)


def test_a_report_to_a_rank_that_keeps_no_board_is_a_mistake(clock):
    comm, coordinator = make(1, 4, clock)
    coordinator.begin()
    with pytest.raises(CoordinatorError, match="rank 2 reported to rank 1"):
        come(comm, clock, coordinator, report(2, 1, 1, BUSY))
