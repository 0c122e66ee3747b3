"""Runs started from converted checkpoints, on real ranks. Arguments: a directory, then the commands of `main`.

start KIND MEGATRON LAYOUT:   a policy from the Hugging Face directory ROOT/KIND and one from a Megatron checkpoint,
                              one update each: are weights before and after the same bits?
save KIND DIR LAYOUT:         one update and a checkpoint; its weights beside it in after.pt
foreign KIND DIR FLAGS:       a checkpoint of the weights alone, written by megatron-core with other sharding flags
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from megatron_tlt.actor.policy import MegatronPolicy
from megatron_tlt.config.actor import ActorSection
from megatron_tlt.config.model import ModelSection
from megatron_tlt.config.run import DistributedSection
from megatron_tlt.distributed.world import World
from megatron_tlt.errors import CheckpointError
from tests.mpi.workers.actor_common import WeightedNll, say, sequences, share, train_batch
from tests.mpi.workers.actor_scenario import ADAM, copy_of


def build(world: World, model: ModelSection, layout: dict[str, Any]) -> MegatronPolicy:
    """A policy of `model` at the layout."""
    section = ActorSection(**{"micro_batch_tokens": 96, **layout})
    return MegatronPolicy(world, model, section, ADAM, WeightedNll(), total_optimizer_steps=10)


def one_update(policy: MegatronPolicy) -> dict[str, float]:
    """The same update whatever the policy."""
    mine = share(sequences(8, seed=101), policy.dims.dp, policy.groups.at.dp)
    return policy.train_step(train_batch([mine], [120.0])).metrics


def start(world: World, root: Path, kind: str, megatron: str, layout: dict[str, Any]) -> None:
    """Both ways to start, one update each."""
    hf = str(root / kind)
    seen = []
    try:
        for where in (None, megatron):
            policy = build(world, ModelSection(path=hf, megatron_path=where, max_context=512), layout)
            before = copy_of(policy.named_weights())
            metrics = one_update(policy)
            seen.append((before, metrics["loss"], metrics["grad_norm"], copy_of(policy.named_weights())))
    except CheckpointError as error:
        say(world, case="start", kind=kind, error=str(error))
        return
    (a, loss_a, norm_a, after_a), (b, loss_b, norm_b, after_b) = seen
    say(
        world,
        case="start",
        kind=kind,
        same_start=a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a),
        same_loss=(loss_a, norm_a) == (loss_b, norm_b),
        same_after=all(torch.equal(after_a[n], after_b[n]) for n in a),
        moved=all(not torch.equal(b[n], after_b[n]) for n in a),
        grad_norm=norm_b,
    )


def save(world: World, root: Path, kind: str, where: str, layout: dict[str, Any]) -> None:
    """One update, one checkpoint."""
    policy = build(world, ModelSection(path=str(root / kind), max_context=512), layout)
    one_update(policy)
    policy.start_save(Path(where) / "step-000001", {}).wait()
    weights = copy_of(policy.named_weights())
    if world.is_main:
        torch.save(weights, Path(where) / "after.pt")
    say(world, case="save", kind=kind)


def foreign(world: World, root: Path, kind: str, where: str, options: dict[str, Any]) -> None:
    """What megatron-core writes for another program: weights under its own choice of keys."""
    from megatron.core import dist_checkpointing

    from megatron_tlt.actor.device import cpu_as_cuda
    from megatron_tlt.actor.shard_writer import ThreadSaveStrategy

    policy = build(world, ModelSection(path=str(root / kind), max_context=512), options["layout"])
    if world.is_main:
        Path(where).mkdir(parents=True)
    world.barrier()
    strategy = ThreadSaveStrategy(policy.groups.dp)
    metadata = {**options["flags"], "dp_cp_group": policy.groups.dp}
    with cpu_as_cuda():
        state = {"model": policy.model.module.sharded_state_dict(metadata=metadata)}
        request = dist_checkpointing.save(state, where, strategy, async_sharded_save=True)
        assert strategy.writer is not None and request is not None
        strategy.writer.start({})
        strategy.writer.join()
        assert strategy.writer.failure() is None
        for finish in request.finalize_fns:
            finish()
    say(world, case="foreign", kind=kind)


def main() -> None:
    """Commands separated by '+'."""
    world = World.start(DistributedSection(device="cpu"), threads=1)
    root = Path(sys.argv[1])
    for command in " ".join(sys.argv[2:]).split(" + "):
        verb, kind, where, options = command.split(" ", 3)
        {"start": start, "save": save, "foreign": foreign}[verb](
            world, root, kind, where, json.loads(options)
        )
    world.close()


if __name__ == "__main__":
    main()
