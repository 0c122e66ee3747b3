"""Requests change replicas: each is served once, and every rank leaves the window, whatever the messages' delays."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from megatron_tlt.config.idle import IdleSection
from megatron_tlt.idle.board import StatusBoard
from megatron_tlt.idle.coordinator import IdleCoordinator
from megatron_tlt.idle.messages import Kind, Message, Report
from megatron_tlt.idle.policy import share_of_queue
from megatron_tlt.idle.state import RankState
from megatron_tlt.idle.work_stealing import WorkStealing
from tests.helpers.fake_mpi import Done

TICK_S = 0.002


# -- one rank ---------------------------------------------------------------------------------------------------


class Queue:
    """An empty queue."""

    def num_queued(self):
        return 0

    def withdraw_share(self):
        return []


class Sent(list):
    def __call__(self, to, kind, value=0.0, requests=()):
        self.append((to, kind, value, tuple(requests)))

    def taken(self) -> list:
        every, self[:] = list(self), []
        return every


@pytest.fixture
def sent():
    return Sent()


def message(kind, sender=0):
    return Message(kind, sender, 1)


def board_of(*queues: int) -> StatusBoard:
    board = StatusBoard(range(len(queues)))
    board.begin(1)
    for rank, queued in enumerate(queues):
        board.update(Report(rank, 1, 1, RankState.BUSY, queued=queued))
    return board


def test_rank_0_assigns_the_longest_queue_once_a_report(sent):
    leader, board = WorkStealing(range(4), sent, Queue()), board_of(0, 5, 9, 0)
    for rank in (0, 3):
        leader.handle(message(Kind.REQUEST_WORK, rank))
    leader.assign(board)
    assert sent.taken() == [
        (2, Kind.ASSIGN, 0, ()),
        (1, Kind.ASSIGN, 3, ()),
    ]
    leader.handle(message(Kind.REQUEST_WORK, 3))
    leader.assign(board)
    assert sent.taken() == [] and leader.has_open_requests
    board.update(Report(1, 2, 1, RankState.BUSY, queued=2))
    leader.assign(board)
    assert sent.taken() == [(1, Kind.ASSIGN, 3, ())]


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

    def post(self, source: int, to: int, message: Message) -> None:
        link = self.links.setdefault((source, to), deque())
        due = self.time + self.rng.choice((0.0, 0.0, 0.001, 0.01, 0.05))
        link.append((max(due, link[-1][0] if link else 0.0), message))

    def carries(self, kind: Kind) -> bool:
        """Whether a message of this kind, with something in it, is on its way."""
        on_their_way = (message for link in self.links.values() for _, message in link)
        return any(message.kind is kind and message.requests for message in on_their_way)

    def fetch(self, to: int) -> Message | None:
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

    def isend(self, message: Message, dest: int) -> Done:
        assert dest != self.rank
        self.net.post(self.rank, dest, message)
        return Done()

    def improbe(self) -> Done | None:
        message = self.net.fetch(self.rank)
        return None if message is None else Done(message)

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
    """A queue that is worked off, some requests at a time, each taking some ticks; then what an idle rank does."""

    def __init__(self, net: Net, rank: int, capacity: int):
        section = IdleSection(poll_ms=1e3 * TICK_S)
        self.coordinator = IdleCoordinator(Comm(net, rank), section, clock=net.now, wall=net.now, queue=self)
        self.rng, self.capacity = net.rng, capacity
        self.answered: list[tuple[int, int]] = []
        self.ends_early = 0.0  # chance to drop everything, each tick, as after a signal

    def begin(self, requests: list[tuple[int, int]]) -> None:
        self.queue, self.running = deque(requests), []
        self.taken, self.has_entered, self.is_out, self.dropped = 0, False, False, False
        self.answered.clear()
        self.coordinator.begin()

    def num_queued(self) -> int:
        return len(self.queue)

    def withdraw_share(self) -> list[tuple[int, int]]:
        count = share_of_queue(len(self.queue), len(self.running))
        return [self.queue.pop() for _ in range(count)]

    def tick(self) -> None:
        if self.has_entered:
            self.is_out = self.coordinator.test_done()
        elif self.coordinator.state is RankState.BUSY:
            self.work()
        elif requests := self.coordinator.receive_work():
            self.queue.extend(requests)
            self.taken += len(self.queue)
        elif requests is not None:
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
                self.coordinator.progress()
        else:
            self.coordinator.request_work()


def world(size: int, seed: int) -> tuple[Net, list[Replica]]:
    net = Net(random.Random(100 * size + seed), size)
    return net, [Replica(net, rank, net.rng.randint(1, 6)) for rank in range(size)]


def some_requests(net: Net, window: int) -> list[list[tuple[int, int]]]:
    counts = [net.rng.choice((0, 1, 5, 40)) for _ in range(net.size)]
    return [[(100 * window + rank, i) for i in range(n)] for rank, n in enumerate(counts)]


def roll_out(net: Net, replicas: list[Replica]) -> bool:
    """Runs a window to its end; whether NO_WORK was sent while requests could still change places."""
    early = sent = False
    for _ in range(20_000):
        net.time += TICK_S
        for replica in net.rng.sample(replicas, net.size):
            if not replica.is_out and net.rng.random() < 0.8:
                replica.tick()
        if not sent and replicas[0].coordinator._stealing._no_work_sent:
            sent = True
            early = any(replica.queue for replica in replicas) or net.carries(Kind.TRANSFER)
        if all(replica.is_out for replica in replicas):
            return early
    raise AssertionError([replica.coordinator.state for replica in replicas])


def assert_responses(replicas: list[Replica], requests: list[list[tuple[int, int]]]) -> None:
    everything = sorted(response for replica in replicas for response in replica.answered)
    assert everything == sorted(request for mine in requests for request in mine)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(3))
def test_every_request_is_answered_once_and_every_rank_leaves(size, seed):
    net, replicas = world(size, seed)
    moved = 0
    for window in range(4):
        requests = some_requests(net, window)
        for replica, mine in zip(replicas, requests, strict=True):
            replica.begin(mine)
        assert not roll_out(net, replicas)
        assert_responses(replicas, requests)
        moved += sum(replica.taken for replica in replicas)
    if size != 2:  # two may have been done together, or have had too little
        assert (moved > 0) == (size > 1)


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_drops_its_rollout_does_not_delay_the_others(seed):
    """As after a signal: what it had is gone, what was stolen from it is served, every rank leaves."""
    net, replicas = world(5, seed)
    dropped = 0
    for window in range(4):
        for replica, mine in zip(replicas, some_requests(net, window), strict=True):
            replica.ends_early = 0.01
            replica.begin(mine)
        roll_out(net, replicas)
        responses = [response for replica in replicas for response in replica.answered]
        assert len(set(responses)) == len(responses)
        dropped += sum(replica.dropped for replica in replicas)
    assert dropped


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_may_be_a_window_ahead(seed):
    """Ranks do not wait for each other between windows here; a request of a rank ahead is kept by those behind."""
    net, replicas = world(4, seed)
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
    assert at == [5] * 4, [replica.coordinator.state for replica in replicas]
    assert sorted(answered) == sorted(one for window in windows for mine in window for one in mine)


def test_a_queue_is_stolen_while_its_owner_works():
    """One replica with everything, three with nothing: the work takes little more than a quarter of the time."""
    ticks = {}
    for is_stealing in (False, True):
        net = Net(random.Random(4), 4)
        replicas = [Replica(net, rank, 4) for rank in range(4)]
        for rank, replica in enumerate(replicas):
            replica.begin([(0, i) for i in range(240)] if rank == 1 else [])
            if not is_stealing:
                replica.coordinator.progress = lambda: None
                replica.coordinator.poll = lambda force=False: None
                replica.coordinator.receive_work = lambda: ()
        while not all(replica.has_entered for replica in replicas):
            net.time += TICK_S
            for replica in replicas:
                if not replica.is_out:
                    replica.tick()
        ticks[is_stealing] = net.time
    assert 0.25 <= ticks[True] / ticks[False] < 0.4, ticks
