"""Idle windows of replicas of two ranks, which agree over a gloo group: with collective steps, then with a failure."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from megatron_tlt.config.run import DistributedSection
from megatron_tlt.distributed.tensor_parallel import GroupTensorParallel
from megatron_tlt.distributed.world import World
from megatron_tlt.errors import DrafterError
from megatron_tlt.idle.coordinator import IdleCoordinator
from megatron_tlt.idle.policy import IdlePolicy
from megatron_tlt.idle.window import IdleWindow

SIZE = 2
CLOCKS_AGREE_S = 0.001  # see idle_ranks.py


def windows(world: World, tp: GroupTensorParallel, fails: bool) -> None:
    coordinator = IdleCoordinator(world.comm, group_size=SIZE)
    # The ranks of a group have different policies on purpose: the leader's counts.
    policy = IdlePolicy(train_drafter=tp.rank == 0, min_tail_seconds=0.0)
    window = IdleWindow(coordinator, policy, is_group_leader=tp.rank == 0, agree=tp.largest)
    calls = 0

    def step_fn() -> dict[str, float]:
        nonlocal calls
        calls += 1
        if fails and world.rank == 1 and calls == 3:
            raise DrafterError("out of memory")
        time.sleep(0.005 * (1 + tp.rank))
        if not fails:  # a collective in the micro-step: it hangs if the group does not step together
            together = torch.ones(1)
            tp.all_reduce(together)
            assert together.item() == SIZE
        return {"tokens": 3.0}

    replica = world.rank // SIZE
    for slow in (world.size // SIZE - 1, 0):
        world.barrier()
        window.begin()
        until = time.perf_counter() + (0.4 if replica == slow else 0.03 * (1 + replica))
        while (left := until - time.perf_counter()) > 0:
            coordinator.progress(10 * left, 0.0)
            time.sleep(0.002)
        reports = world.all_gather_object(window.run(step_fn))
        assert min(r.left_at for r in reports) > max(r.entered_at for r in reports) - CLOCKS_AGREE_S
        for first in range(0, world.size, SIZE):
            one, two = reports[first], reports[first + 1]
            assert abs(one.steps - two.steps) <= fails, "ranks of a group stepped differently"
        assert reports[slow * SIZE].steps == 0
        if not fails:
            assert all(r.steps > 5 for i, r in enumerate(reports) if i // SIZE != slow)
    reasons = world.all_gather_object(window.disabled_reason)
    if fails:
        assert reasons[:2] == ["training failed on another rank of this replica", "out of memory"]
        assert calls == (3 if world.rank < SIZE else calls)
    assert set(reasons[SIZE if fails else 0 :]) == {None}
    coordinator.close()


def main() -> None:
    world = World.start(DistributedSection(timeout_s=30), threads=1)
    groups = [dist.new_group([first, first + 1]) for first in range(0, world.size, SIZE)]
    tp = GroupTensorParallel(groups[world.rank // SIZE])
    windows(world, tp, fails=False)
    windows(world, tp, fails=True)
    if world.is_main:
        print("ok", flush=True)
    world.close()


main()
