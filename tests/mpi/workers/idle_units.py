"""Idle windows of replicas of two ranks, which agree over a gloo group; argv: how ("steps" or "fails")."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from megatron_tlt.config.idle import IdleSection
from megatron_tlt.config.run import DistributedSection
from megatron_tlt.distributed.tensor_parallel import GroupTensorParallel, agree_on
from megatron_tlt.distributed.world import World
from megatron_tlt.errors import DrafterError
from megatron_tlt.idle.coordinator import IdleCoordinator
from megatron_tlt.idle.policy import IdlePolicy
from megatron_tlt.idle.window import IdleWindow, Unit

UNIT = 2
CLOCKS_AGREE_S = 0.001  # see idle_ranks.py


def main() -> None:
    how = sys.argv[1]
    world = World.start(DistributedSection(timeout_s=30), threads=1)
    groups = [dist.new_group([first, first + 1]) for first in range(0, world.size, UNIT)]
    tp = GroupTensorParallel(groups[world.rank // UNIT])
    coordinator = IdleCoordinator.of(IdleSection(), world.comm, UNIT, world.local_size)
    # Ranks of a unit have different opinions on purpose: the first one's counts.
    policy = IdlePolicy(train_drafter=tp.rank == 0, min_tail_seconds=0.0)
    window = IdleWindow(coordinator, policy, unit=Unit(tp.rank == 0, agree_on(tp)))
    calls = 0

    def step_fn() -> dict[str, float]:
        nonlocal calls
        calls += 1
        if how == "fails" and world.rank == 1 and calls == 3:
            raise DrafterError("out of memory")
        time.sleep(0.005 * (1 + tp.rank))
        together = torch.ones(1)
        if how == "steps":  # a collective in the micro-step: it hangs if the unit does not step together
            tp.all_reduce(together)
            assert together.item() == UNIT
        return {"tokens": 3.0}

    replica, slow = world.rank // UNIT, 0
    for slow in (world.size // UNIT - 1, 0):
        world.barrier()
        window.begin()
        until = time.perf_counter() + (0.4 if replica == slow else 0.03 * (1 + replica))
        while (left := until - time.perf_counter()) > 0:
            coordinator.progress(1, 10 * left, 0.0)
            time.sleep(0.002)
        report = window.run(step_fn)
        reports = world.all_gather_object(report)
        assert min(r.left_at for r in reports) > max(r.entered_at for r in reports) - CLOCKS_AGREE_S
        for first in range(0, world.size, UNIT):
            one, two = reports[first], reports[first + 1]
            assert abs(one.steps - two.steps) <= (how == "fails"), "ranks of a unit stepped differently"
        assert reports[slow * UNIT].steps == 0
        if how == "steps":
            assert all(r.steps > 5 for i, r in enumerate(reports) if i // UNIT != slow)
    speakers = list(range(0, world.size, UNIT))
    assert [e.rank for e in coordinator.board()] == (speakers if world.is_main else [])
    reasons = world.all_gather_object(window.disabled_reason)
    if how == "fails":
        assert reasons[:2] == ["training failed on another rank of this replica", "out of memory"]
        assert calls == (3 if world.rank < UNIT else calls)
    assert set(reasons[UNIT if how == "fails" else 0 :]) == {None}
    coordinator.close()
    if world.is_main:
        print("ok", flush=True)
    world.close()


main()
