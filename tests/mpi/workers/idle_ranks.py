"""Idle windows on real ranks, without torch; argv: scenarios, each `name` or `name:argument:...`.

Rank 0 prints the figures of each.
The checks between windows use COMM_WORLD, not the coordinator's communicator.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import time
from contextlib import closing

from mpi4py import MPI

from megatron_tlt.idle.coordinator import IdleCoordinator
from megatron_tlt.idle.policy import IdlePolicy, share_of_queue
from megatron_tlt.idle.state import RankState
from megatron_tlt.idle.window import IdleWindow, WindowReport

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
EAGER = IdlePolicy(min_tail_seconds=0.0)
STEP_S = 0.004
CLOCKS_AGREE_S = 0.001  # each process has read the wall clock once, and it may be slewed between two starts


def step() -> dict[str, float]:
    time.sleep(STEP_S)
    return {"tokens": 7.0, "loss": 2.0}


def work(coordinator: IdleCoordinator, seconds: float) -> None:
    """A rollout, reported every 2 ms."""
    end = time.perf_counter() + seconds
    while (left := end - time.perf_counter()) > 0:
        coordinator.progress()
        time.sleep(min(left, 0.002))


def check(report: WindowReport) -> list[WindowReport]:
    """What must hold after every window; returns the reports of all ranks."""
    for one, two in itertools.pairwise(report.spans):
        assert one.end == two.start
    assert report.spans[0].state is RankState.BUSY
    total = report.spans[-1].end - report.spans[0].start
    assert abs(sum(s.seconds for s in report.spans) - total) < 1e-9
    assert report.tokens == 7 * report.steps
    assert report.training_seconds <= report.idle_seconds
    reports = WORLD.allgather(report)
    assert min(r.left_at for r in reports) > max(r.entered_at for r in reports) - CLOCKS_AGREE_S, (
        "left before all were done"
    )
    return reports


def say_ok(**figures: object) -> None:
    if RANK == 0:
        print("ok", sys._getframe(1).f_code.co_name, json.dumps(figures), flush=True)


def orders() -> None:
    """Ranks finish in every order (8 ranks: in some); the one that is last never trains, the first one does."""
    some = list(itertools.permutations(range(SIZE))) if SIZE <= 4 else []
    rng = random.Random(3)
    while len(some) < 12 and SIZE > 4:
        some.append(tuple(rng.sample(range(SIZE), SIZE)))
    trained = late = 0
    with closing(IdleCoordinator(WORLD)) as coordinator:
        window = IdleWindow(coordinator, EAGER)
        for order in some:
            window.begin()
            work(coordinator, 0.03 * (1 + order[RANK]))
            reports = check(window.run(step))
            last = max(range(SIZE), key=lambda r: reports[r].entered_at)
            late += reports[last].steps
            trained += sum(r.steps for r in reports)
        assert coordinator.epoch == len(some)
    assert (trained > 0) == (SIZE > 1)
    assert late <= max(2, trained // 10)  # not 0: ranks share cores, and two may be last
    say_ok(windows=len(some), steps=trained)


def never_idle() -> None:
    """One rank is always the slowest by far: the others train the whole time."""
    with closing(IdleCoordinator(WORLD)) as coordinator:
        window = IdleWindow(coordinator, IdlePolicy(min_tail_seconds=0.02))
        shares = []
        for slow in (0, SIZE - 1):
            WORLD.Barrier()
            window.begin()
            work(coordinator, 0.6 if slow == RANK else 0.02)
            reports = check(window.run(step))
            assert reports[slow].steps == 0
            others = [r for i, r in enumerate(reports) if i != slow]
            shares.append(min(r.training_seconds / r.idle_seconds for r in others))
        assert min(shares) > 0.4, shares
    say_ok(trained_share=[round(s, 3) for s in shares])


def leak(windows: str) -> None:
    with closing(IdleCoordinator(WORLD)) as coordinator:
        window = IdleWindow(coordinator, EAGER, sleep=lambda s: time.sleep(s / 10))
        most, early, total = 0, 0, int(windows)
        rng = random.Random(RANK)
        for i in range(total):
            window.begin()
            if rng.random() < 0.1:
                work(coordinator, rng.random() * 0.004)
            window.run(lambda: None)
            most = max(most, coordinator.outstanding)
            if i == total // 4:
                early = rss_kib()
        grown = WORLD.allreduce(rss_kib() - early, MPI.MAX)
        most = WORLD.allreduce(most, MPI.MAX)
        assert coordinator.epoch == total
    assert most <= 4 * SIZE, most
    assert grown < 4096, grown
    say_ok(windows=total, outstanding=most, grown_kib=grown)


def rss_kib() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def slow_step() -> None:
    """A micro-step of 0.25 s: everyone is out about one of it after the last one was done, not several."""
    stops = []
    with closing(IdleCoordinator(WORLD)) as coordinator:
        window = IdleWindow(coordinator, EAGER)
        for last in range(min(SIZE, 4)):
            WORLD.Barrier()
            window.begin()
            work(coordinator, 0.4 if last == RANK else 0.02 * RANK)

            def long_step() -> dict[str, float]:
                time.sleep(0.25)
                return {"tokens": 7.0}

            reports = check(window.run(long_step))
            stops.append(max(r.left_at for r in reports) - max(r.entered_at for r in reports))
            assert all(r.last_done_at is not None for r in reports), "ALL_DONE did not come"
    assert sorted(stops)[len(stops) // 2] < 0.25 + 0.2, stops
    say_ok(stops=stops)


class Queue:
    """The queue of one rank; `running` of its requests are being answered."""

    def __init__(self) -> None:
        self.requests: list[tuple[int, int]] = []
        self.running = 0

    def num_queued(self) -> int:
        return len(self.requests)

    def withdraw_share(self) -> list[tuple[int, int]]:
        count = share_of_queue(len(self.requests), self.running)
        return [self.requests.pop() for _ in range(count)]


def steals() -> None:
    """All requests are one rank's at first, a different one each window; every one is served once."""
    queue, stolen = Queue(), 0
    coordinator = IdleCoordinator(WORLD, queue=queue)
    window = IdleWindow(coordinator, EAGER)
    for number, rich in enumerate((0, SIZE - 1, 1)):
        queue.requests = [(number, i) for i in range(200)] if rich == RANK else []
        answered: list[tuple[int, int]] = []
        WORLD.Barrier()
        window.begin()
        while True:
            while queue.requests:
                some, queue.requests[:2] = queue.requests[:2], []
                queue.running = len(some)
                coordinator.progress()
                time.sleep(0.002)
                answered += some
                queue.running = 0
            requests = window.steal_work()
            if not requests:
                break
            queue.requests += requests
            stolen += len(queue.requests)
        reports = check(window.run(step))
        everything = sorted(one for part in WORLD.allgather(answered) for one in part)
        assert everything == [(number, i) for i in range(200)]
        assert all(WORLD.allgather(bool(answered))), "a rank got no request"
        stops = max(r.left_at for r in reports) - max(r.entered_at for r in reports)
        assert stops < 0.25, stops
    stolen = WORLD.allreduce(stolen)
    coordinator.close()
    say_ok(stolen=stolen)


for scenario in sys.argv[1:]:
    name, *arguments = scenario.split(":")
    globals()[name](*arguments)
