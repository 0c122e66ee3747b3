"""Requests change replicas: every one is answered once, and nobody is lost, whatever the messages' delays."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from megatron_tlt.idle.board import StatusBoard
from megatron_tlt.idle.coordinator import IdleCoordinator
from megatron_tlt.idle.messages import MAX_PIECES, Kind, Message, Report, RequestRange, pack, unpack
from megatron_tlt.idle.policy import share_of_queue
from megatron_tlt.idle.state import RankState
from megatron_tlt.idle.work_stealing import Takeover, pieces_of
from tests.helpers.fake_mpi import Done

TICK_S = 0.002


def test_pieces_are_runs_of_samples():
    assert pieces_of([(7, 2), (3, 0), (7, 1), (3, 2), (7, 3)]) == [
        RequestRange(3, 0, 1),
        RequestRange(3, 2, 1),
        RequestRange(7, 1, 3),
    ]
    assert pieces_of([]) == []


# -- one rank ---------------------------------------------------------------------------------------------------


def nothing():
    return (), 0


class Sent(list):
    def __call__(self, to, kind, value=0.0, pieces=()):
        self.append((to, kind, value, tuple(pieces)))

    def taken(self) -> list:
        every, self[:] = list(self), []
        return every


class Still:
    def now(self) -> float:
        return 0.0


@pytest.fixture
def sent():
    return Sent()


def message(kind, sender=0, value=0.0, pieces=()):
    return Message(kind, sender, 1, value, pieces=tuple(pieces))


def board_of(*queues: int) -> StatusBoard:
    board = StatusBoard(range(len(queues)), Still())
    board.begin(1)
    for rank, queued in enumerate(queues):
        board.take(Report(rank, 1, 1, RankState.BUSY, queued=queued), via=rank)
    return board


def test_a_dry_rank_asks_and_is_settled_by_the_answer_alone(sent):
    taker = Takeover(range(4), sent, nothing)
    taker.ask(1)
    assert sent.taken() == [(0, Kind.ASK, 1, ())]
    taker.handle(message(Kind.DRY, value=0.0))  # told to all; a grant may be on its way all the same
    assert not taker.is_settled
    taker.handle(message(Kind.GIVE, 2, 1.0, [RequestRange(5, 0, 3)]))
    assert not taker.is_settled
    assert taker.collect() == (RequestRange(5, 0, 3),)
    taker.ask(1)
    assert taker.is_settled and taker.collect() == () and sent.taken() == []


def test_an_empty_gift_is_followed_by_the_next_question(sent):
    taker = Takeover(range(4), sent, nothing)
    taker.ask(1)
    taker.handle(message(Kind.GIVE, 2, 1.0))
    assert sent.taken() == [(0, Kind.ASK, 1, ()), (0, Kind.ASK, 1, ())]
    taker.handle(message(Kind.DRY, value=1.0))
    assert taker.is_settled


def test_a_large_gift_comes_in_several_messages(sent):
    pieces = [RequestRange(i, 0, 1) for i in range(2 * MAX_PIECES + 5)]
    giver, taker = Takeover(range(4), sent, lambda: (pieces, 9)), Takeover(range(4), sent, nothing)
    assert giver.handle(message(Kind.GRANT, value=3.0)) == 9
    gifts = sent.taken()
    assert [(to, kind, value, len(some)) for to, kind, value, some in gifts] == [
        (3, Kind.GIVE, 0.0, MAX_PIECES),
        (3, Kind.GIVE, 0.0, MAX_PIECES),
        (3, Kind.GIVE, 1.0, 5),
    ]
    taker.ask(1)
    for _, kind, value, some in gifts:
        assert taker.collect() == ()
        taker.handle(message(kind, 2, value, some))
    assert taker.collect() == tuple(pieces)


def test_rank_0_chooses_the_longest_queue_and_asks_it_once_a_report(sent):
    leader, board = Takeover(range(4), sent, nothing), board_of(0, 5, 9, 0)
    for rank in (0, 3):
        leader.handle(message(Kind.ASK, rank))
    leader.lead(board)
    assert sent.taken() == [
        (2, Kind.GRANT, 0, ()),
        (1, Kind.GRANT, 3, ()),
    ]
    leader.handle(message(Kind.ASK, 3))
    leader.lead(board)
    assert sent.taken() == [] and leader.must_lead
    board.take(Report(1, 2, 1, RankState.BUSY, queued=2), via=1)
    leader.lead(board)
    assert sent.taken() == [(1, Kind.GRANT, 3, ())]


def test_what_was_given_to_a_rank_is_waited_for(sent):
    """Reports that only say that the taker is still dry, as a heartbeat does, change nothing."""
    leader, board = Takeover(range(3), sent, nothing), board_of(0, 4, 0)
    leader.handle(message(Kind.ASK, 2, 3.0))  # it overtook its report number 3, and that of before
    leader.lead(board)
    assert sent.taken() == [(1, Kind.GRANT, 2, ())]
    board.take(Report(1, 2, 1, RankState.BUSY, queued=0), via=1)
    board.take(Report(2, 2, 1, RankState.BUSY, queued=0), via=2)
    leader.lead(board)
    assert sent.taken() == []
    for seq in (3, 4):
        board.take(Report(2, seq, 1, RankState.IDLE, asks=True), via=2)
        leader.lead(board)
        assert sent.taken() == []
    board.take(Report(2, 5, 1, RankState.BUSY, queued=-1), via=2)
    leader.lead(board)
    assert sent.taken() == []
    board.take(Report(2, 6, 1, RankState.BUSY, queued=2), via=2)
    leader.handle(message(Kind.ASK, 0))
    leader.lead(board)
    assert sent.taken() == [(2, Kind.GRANT, 0, ())]


def test_an_answer_that_came_before_the_question_is_read_first():
    net = Net(random.Random(1), 2)
    comm = Comm(net, 1)
    coordinator = IdleCoordinator(comm, clock=net, wall=net.now, give=nothing)
    coordinator.begin()
    net.links[0, 1] = deque([(0.0, bytes(pack(Kind.DRY, 0, 1)))])
    net.links.pop((1, 0))
    coordinator.ask_for_work()
    assert coordinator.given_work() == ()
    assert [unpack(data).kind for _, data in net.links[1, 0]] == [Kind.REPORT]


def test_rank_0_says_that_there_is_nothing_once_it_knows_of_all(sent):
    leader, board = Takeover(range(3), sent, nothing), board_of(0, -1, 0)
    leader.handle(message(Kind.ASK, 2))
    leader.lead(board)
    assert sent.taken() == []
    board.take(Report(1, 2, 1, RankState.BUSY, queued=0), via=1)
    leader.lead(board)
    assert sent.taken() == [(rank, Kind.DRY, float(rank == 2), ()) for rank in range(3)]
    assert not leader.must_lead
    leader.handle(message(Kind.ASK, 1))  # it had not heard yet
    leader.lead(board)
    assert sent.taken() == [(1, Kind.DRY, 1.0, ())]


# -- a world ------------------------------------------------------------------------------------------------------


@dataclass
class Net:
    """MPI between coordinators: in order between two ranks, late as chance has it; one barrier a window."""

    rng: random.Random
    size: int
    time: float = 0.0
    links: dict = field(default_factory=dict)
    entered: int = 0

    def now(self) -> float:
        return self.time

    def post(self, source: int, to: int, data: bytes) -> None:
        link = self.links.setdefault((source, to), deque())
        due = self.time + self.rng.choice((0.0, 0.0, 0.001, 0.01, 0.05))
        link.append((max(due, link[-1][0] if link else 0.0), bytes(data)))

    def carries(self, kind: Kind) -> bool:
        """Whether a message of this kind, with something in it, is on its way."""
        on_their_way = (unpack(data) for link in self.links.values() for _, data in link)
        return any(message.kind is kind and message.pieces for message in on_their_way)

    def fetch(self, to: int) -> bytes | None:
        due = [link for (_, target), link in self.links.items() if target == to and link]
        due = [link for link in due if link[0][0] <= self.time]
        return self.rng.choice(due).popleft()[1] if due else None


@dataclass
class Comm:
    net: Net
    rank: int

    @property
    def size(self) -> int:
        return self.net.size

    def Dup(self) -> Comm:
        return self

    def Isend(self, data: bytearray, dest: int) -> Done:
        assert dest != self.rank
        self.net.post(self.rank, dest, data)
        return Done()

    def Improbe(self) -> Done | None:
        data = self.net.fetch(self.rank)
        return None if data is None else Done(data)

    def Ibarrier(self) -> Barrier:
        self.net.entered += 1
        return Barrier(self.net, -(-self.net.entered // self.size) * self.size)


@dataclass
class Barrier:
    net: Net
    wanted: int

    def Test(self) -> bool:
        return self.net.entered >= self.wanted


class Replica:
    """A queue that is worked off, some requests at a time, each taking some ticks; then what a dry rank does."""

    def __init__(self, net: Net, rank: int, capacity: int, **options: float):
        self.coordinator = IdleCoordinator(
            Comm(net, rank), clock=net, wall=net.now, give=self.give, min_poll_seconds=TICK_S, **options
        )
        self.rng, self.capacity = net.rng, capacity
        self.answered: list[tuple[int, int]] = []
        self.ends_early = 0.0  # chance to drop everything, each tick, as after a signal

    def begin(self, requests: list[tuple[int, int]]) -> None:
        self.queue, self.running = deque(requests), []
        self.taken, self.has_entered, self.is_out, self.dropped = 0, False, False, False
        self.answered.clear()
        self.coordinator.begin()

    def give(self):
        count = share_of_queue(len(self.queue), len(self.running))
        given = [self.queue.pop() for _ in range(count)]
        return pieces_of(given), len(self.queue)

    def tick(self) -> None:
        if self.has_entered:
            self.is_out = self.coordinator.all_done()
        elif self.coordinator.state is RankState.BUSY:
            self.work()
        elif pieces := self.coordinator.given_work():
            self.queue.extend((p.prompt_id, p.first + i) for p in pieces for i in range(p.count))
            self.taken += len(self.queue)
        elif pieces is not None:
            self.enter()

    def enter(self) -> None:
        self.has_entered = True
        self.coordinator.enter_done()

    def work(self) -> None:
        if self.rng.random() < self.ends_early:
            self.dropped = True
            self.queue.clear()
            self.enter()
            return
        while self.queue and len(self.running) < self.capacity:
            self.running.append((self.queue.popleft(), self.rng.randint(1, 40)))
        self.answered += [request for request, left in self.running if left == 1]
        self.running = [(request, left - 1) for request, left in self.running if left > 1]
        if self.running or self.queue:
            if self.rng.random() < 0.5:
                self.coordinator.progress(len(self.running), 10.0, 5.0, len(self.queue))
        else:
            self.coordinator.ask_for_work()


DIRECT = {"sub_leaders_above": 500, "heartbeat_seconds": 1.0}
NOISY = {"sub_leaders_above": 500, "heartbeat_seconds": 0.02}
THROUGH_NODES = {"sub_leaders_above": 2, "ranks_per_node": 2, "heartbeat_seconds": 0.02}


def world(size: int, seed: int, options: dict) -> tuple[Net, list[Replica]]:
    net = Net(random.Random(100 * size + seed), size)
    return net, [Replica(net, rank, net.rng.randint(1, 6), **options) for rank in range(size)]


def some_requests(net: Net, window: int) -> list[list[tuple[int, int]]]:
    counts = [net.rng.choice((0, 1, 5, 40)) for _ in range(net.size)]
    return [[(100 * window + rank, i) for i in range(n)] for rank, n in enumerate(counts)]


def roll_out(net: Net, replicas: list[Replica]) -> bool:
    """Runs a window to its end; whether DRY was told while requests could still change places."""
    early = told = False
    for _ in range(20_000):
        net.time += TICK_S
        for replica in net.rng.sample(replicas, net.size):
            if not replica.is_out and net.rng.random() < 0.8:
                replica.tick()
        if not told and replicas[0].coordinator._takeover._has_told:
            told = True
            early = any(replica.queue for replica in replicas) or net.carries(Kind.GIVE)
        if all(replica.is_out for replica in replicas):
            return early
    raise AssertionError([replica.coordinator.board_text() for replica in replicas])


def assert_answered(replicas: list[Replica], requests: list[list[tuple[int, int]]]) -> None:
    everything = sorted(answer for replica in replicas for answer in replica.answered)
    assert everything == sorted(request for mine in requests for request in mine)


@pytest.mark.parametrize("options", [DIRECT, NOISY, THROUGH_NODES], ids=["direct", "noisy", "through nodes"])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(4))
def test_every_request_is_answered_once_and_everybody_leaves(size, seed, options):
    net, replicas = world(size, seed, options)
    moved = 0
    for window in range(4):
        requests = some_requests(net, window)
        for replica, mine in zip(replicas, requests, strict=True):
            replica.begin(mine)
        assert not roll_out(net, replicas)
        assert_answered(replicas, requests)
        moved += sum(replica.taken for replica in replicas)
    if size != 2:  # two may have been dry together, or have had too little
        assert (moved > 0) == (size > 1)


@pytest.mark.parametrize("seed", range(8))
def test_a_rank_that_drops_its_rollout_holds_up_nobody(seed):
    """As after a signal: what it had is gone, what it gave away is answered, everybody leaves."""
    net, replicas = world(5, seed, THROUGH_NODES)
    dropped = 0
    for window in range(4):
        for replica, mine in zip(replicas, some_requests(net, window), strict=True):
            replica.ends_early = 0.01
            replica.begin(mine)
        roll_out(net, replicas)
        answers = [answer for replica in replicas for answer in replica.answered]
        assert len(set(answers)) == len(answers)
        dropped += sum(replica.dropped for replica in replicas)
    assert dropped


@pytest.mark.parametrize("seed", range(8))
def test_a_rank_may_be_a_window_ahead(seed):
    """Nothing holds ranks together between windows here; what a rank ahead asks is kept for those behind."""
    net, replicas = world(4, seed, DIRECT)
    windows = [some_requests(net, window) for window in range(5)]
    at, answered = [0] * 4, []
    for rank, replica in enumerate(replicas):
        replica.begin(windows[0][rank])
    for _ in range(40_000):
        net.time += TICK_S
        for rank, replica in enumerate(replicas):
            if net.rng.random() < (0.1 if rank == 0 else 0.9) and at[rank] < 5:
                replica.tick()
            if replica.is_out and at[rank] < 5:
                answered += replica.answered
                at[rank] += 1
                if at[rank] < 5:
                    replica.begin(windows[at[rank]][rank])
        if at == [5] * 4:
            break
    assert at == [5] * 4, [replica.coordinator.board_text() for replica in replicas]
    assert sorted(answered) == sorted(one for window in windows for mine in window for one in mine)


def test_a_queue_is_shared_out_while_its_owner_works():
    """One replica with everything, three with nothing: the work takes little more than a quarter of the time."""
    ticks = {}
    for take_over in (False, True):
        net = Net(random.Random(4), 4)
        replicas = [Replica(net, rank, 4) for rank in range(4)]
        for rank, replica in enumerate(replicas):
            replica.begin([(0, i) for i in range(240)] if rank == 1 else [])
            if not take_over:
                replica.coordinator.progress = lambda *_: None
                replica.coordinator.poll = lambda force=False: None
                replica.coordinator.given_work = lambda: ()
        while not all(replica.has_entered for replica in replicas):
            net.time += TICK_S
            for replica in replicas:
                if not replica.is_out:
                    replica.tick()
        ticks[take_over] = net.time
    assert 0.25 <= ticks[True] / ticks[False] < 0.4, ticks
