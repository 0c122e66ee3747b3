"""Idle windows on real ranks; argv: scenarios, each `name` or `name:argument:...`.

Rank 0 prints the figures of each.
The checks between windows use the world's communicator, not the coordinator's.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from contextlib import closing

from megatron_tlt.config.idle import IdleSection
from megatron_tlt.config.run import DistributedSection
from megatron_tlt.distributed.world import World
from megatron_tlt.idle.coordinator import IdleCoordinator
from megatron_tlt.idle.state import RankState
from megatron_tlt.idle.window import IdleWindow, WindowReport

JOB = World.start(DistributedSection(), threads=1)
WORLD = JOB.comm
RANK, SIZE = WORLD.rank, WORLD.size
EAGER = IdleSection(train_drafter=True, min_tail_seconds=0.0)
STEP_S = 0.004
CLOCKS_AGREE_S = 0.001  # each process has read the wall clock once, and it may be slewed between two starts


def step() -> dict[str, float]:
    time.sleep(STEP_S)
    return {"tokens": 7.0, "loss": 2.0}


def coordinate() -> IdleCoordinator:
    return IdleCoordinator(WORLD, JOB.new_counter())


def check(report: WindowReport) -> list[WindowReport]:
    """What must hold after every window; returns the reports of all ranks."""
    for one, two in itertools.pairwise(report.spans):
        assert one.end == two.start
    assert report.spans[0].state is RankState.BUSY
    total = report.spans[-1].end - report.spans[0].start
    assert abs(sum(s.seconds for s in report.spans) - total) < 1e-9
    assert report.tokens == 7 * report.steps
    assert report.training_seconds <= total - report.spans[0].seconds
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
    with closing(coordinate()) as coordinator:
        window = IdleWindow(coordinator, EAGER, num_samples=lambda: 1)
        for order in some:
            window.begin()
            time.sleep(0.03 * (1 + order[RANK]))
            reports = check(window.run(step))
            last = max(range(SIZE), key=lambda r: reports[r].entered_at)
            late += reports[last].steps
            trained += sum(r.steps for r in reports)
        assert coordinator.windows == len(some)
    assert (trained > 0) == (SIZE > 1)
    assert late <= max(2, trained // 10)  # not 0: ranks share cores, and two may be last
    say_ok(windows=len(some), steps=trained)


def slow_step() -> None:
    """A micro-step of 0.25 s: everyone is out about one of it after the last one was done, not several.

    Rank 0, whose store keeps the counter, computes in Python all that time.
    """
    stops = []
    with closing(coordinate()) as coordinator:
        window = IdleWindow(coordinator, EAGER, num_samples=lambda: 1)
        for last in range(min(SIZE, 4)):
            WORLD.Barrier()
            window.begin()
            time.sleep(0.4 if last == RANK else 0.02 * RANK)

            def long_step() -> dict[str, float]:
                end = time.perf_counter() + 0.25
                while (left := end - time.perf_counter()) > 0:
                    time.sleep(left if RANK else 0)
                return {"tokens": 7.0}

            reports = check(window.run(long_step))
            stops.append(max(r.left_at for r in reports) - max(r.entered_at for r in reports))
    assert sorted(stops)[len(stops) // 2] < 0.25 + 0.2, stops
    say_ok(stops=stops)


for scenario in sys.argv[1:]:
    globals()[scenario]()
JOB.close()
