"""`OnlineDrafterTrainer` over real ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_tlt.config.run import DistributedSection
from megatron_tlt.distributed.tensor_parallel import GroupTensorParallel
from megatron_tlt.distributed.world import World
from megatron_tlt.drafters.training.sharing import HiddenStateSharing
from megatron_tlt.drafters.training.trainer import DrafterTrainer
from megatron_tlt.errors import DrafterError
from tests.helpers.tiny_drafters import CONFIG, everything, lookup_tables, online_trainer, random_chunk

CLOSE = {"atol": 1e-6, "rtol": 1e-5}


def assert_same(world: World, tensor: torch.Tensor) -> None:
    assert len(set(world.all_gather_object(tensor.numpy().tobytes()))) == 1, "ranks hold different bits"


def merge(world: World) -> None:
    """Windows in which ranks train unequally long: all, some, one, none, and with a failed one."""
    t = online_trainer(first_prompt=100 * world.rank, world=world)
    version, rate_steps = 0, 0
    everyone = range(world.size)
    windows = [[2 * r + 1 for r in everyone], [3 * (r % 2) for r in everyone], [5 * (r == 0) for r in everyone]]
    for steps in [*windows, [0] * world.size, windows[0]]:
        for _ in range(steps[world.rank]):
            t.train_step()
        parts = world.all_gather_object((t.window_tokens, everything(t), t.trained_steps))
        before = everything(t)
        report = t.merge_replicas()
        total = sum(tokens for tokens, _, _ in parts)
        assert not report["drafter/disabled"]
        if total:
            version += 1
            mean = sum(state.double() * tokens for tokens, state, _ in parts) / total
            torch.testing.assert_close(everything(t), mean.float(), **CLOSE)
            rate_steps = max(s for _, _, s in parts)
        else:
            assert torch.equal(everything(t), before)
        assert t.version == version
        assert t.trained_steps == rate_steps
        assert_same(world, everything(t))
    fail(world, t)
    spoil(world, t)
    print(f"merged as it should on rank {world.rank}\n", end="", flush=True)


def fail(world: World, t) -> None:
    """The last rank trains, then fails: the merge is that of the others."""
    last = world.size - 1
    begun = everything(t)
    t.train_step()
    if world.rank == last:
        t.disable()
        assert torch.equal(everything(t), begun)
    parts = world.all_gather_object((t.window_tokens, everything(t)))
    assert t.merge_replicas()["drafter/disabled"] == 1
    total = sum(tokens for tokens, _ in parts)
    if total:
        mean = sum(state.double() * tokens for tokens, state in parts) / total
        torch.testing.assert_close(everything(t), mean.float(), **CLOSE)
    assert_same(world, everything(t))
    assert t.has_failed == (world.rank == last) and t.train_step() is None, "training ends on all ranks"


def spoil(world: World, t) -> None:
    """Rank 0's weights overflow in the mean: all ranks are where they were, and stop."""
    t.has_failed, t._is_training = False, True
    begun = everything(t)
    t.train_step()
    if world.rank == 0:
        with torch.no_grad():
            next(t.model.parameters())[0, 0] = torch.inf
    assert t.merge_replicas()["drafter/disabled"] == world.size
    assert torch.equal(everything(t), begun)
    assert t.has_failed and t.train_step() is None
    assert_same(world, everything(t))


def group(world: World) -> None:
    """Each pair of ranks against a single rank with twice the tokens."""
    groups = [dist.new_group([r, r + 1]) for r in range(0, world.size, 2)]
    pair = GroupTensorParallel(groups[world.rank // 2])
    replica = world.rank // 2
    options = {"first_prompt": 100 * replica, "lr": 1e-3}
    together = online_trainer(pair, micro_step_tokens=64, world=world, **options)
    single = online_trainer(micro_step_tokens=128, **options)
    single.buffer._window = 64  # the same windows
    for _ in range(6 + replica):
        a, b = together.train_step(), single.train_step()
        assert a is not None and b is not None and a.keys() == b.keys()
        for name, value in a.items():
            assert abs(value - b[name]) <= 1e-5 * max(1.0, abs(b[name])), (name, value, b[name])
    torch.testing.assert_close(everything(together), everything(single), atol=2e-6, rtol=0)  # lr is 1e-3
    shares, tokens = zip(*world.all_gather_object((together.window_tokens, single.window_tokens)), strict=True)
    together.merge_replicas()
    assert sum(shares) == sum(tokens[::2]), "shares of a group add up to its sample"
    assert_same(world, everything(together))
    fail_together(together, world)
    print(f"one group on rank {world.rank}\n", end="", flush=True)


def fail_together(t, world: World) -> None:
    """Memory runs out on the first rank of every group: both ranks stop at once, none waits."""
    begun = everything(t)
    t.train_step()
    if world.rank % 2 == 0:

        def fail(*_):
            raise torch.OutOfMemoryError("made to fail")

        t._trainer.backward = fail
    assert isinstance(t._trainer, DrafterTrainer)
    try:
        t.train_step()
    except DrafterError:
        assert torch.equal(everything(t), begun)
    else:
        raise AssertionError("a group went on without a rank")
    assert t.merge_replicas()["drafter/disabled"] == world.size


def share(world: World) -> None:
    """Replicas (pairs of ranks, if there are four) with responses of their own; later one of them has failed."""
    ranks = 2 if world.size == 4 else 1
    replica, replicas = world.rank // ranks, world.size // ranks
    lengths = [(60, 8, 9), (30, 20, 10)][replica % 2]
    is_leader = world.rank % ranks == 0
    sharing = HiddenStateSharing(replica, replicas, ranks, 1 << 20, is_leader)
    trainer = online_trainer(lengths=lengths, first_prompt=100 * replica, world=world, sharing=sharing)
    responses = {r: [100 * r + i for i in range(3)] for r in range(replicas)}
    trainer.merge()
    assert held(trainer) == sorted(responses[replica]), "no rank has trained"
    for merges in range(1, replicas + 1):
        trainer.train_step()
        trainer.merge()
        given = {merge % replicas for merge in range(1, merges + 1)} if replicas > 1 else set()
        assert held(trainer) == sorted(p for r in given | {replica} for p in responses[r]), "one sender at a time"
    trainer.begin_step(1, lambda: lookup_tables(CONFIG))
    drawn = [[s.token_ids.tolist() for s in trainer.buffer.sample(64) or []] for _ in range(9)]
    peers = world.all_gather_object((replica, drawn))
    assert all(theirs == drawn for peer, theirs in peers if peer == replica), "a group draws the same"
    if world.rank == world.size - 1:
        trainer.disable()
    trainer.buffer.add(random_chunk(CONFIG, 70, 1000 + replica, 1))
    before = held(trainer)
    trainer.merge()
    assert held(trainer) == before and not trainer._is_training, "nothing is shared once training has ended"
    print(f"shared on rank {world.rank}\n", end="", flush=True)


def held(trainer) -> list[int]:
    """Prompts of the responses in the buffer."""
    return sorted(key[1] for key in trainer.buffer._entries)


def main() -> None:
    world = World.start(DistributedSection(), threads=1)
    merge(world)
    if world.size % 2 == 0:
        group(world)
    share(world)
    world.close()


main()
