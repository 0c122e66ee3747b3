"""Checkpoints on real ranks. Arguments: the directory with models, then commands `verb DIR [more]`.

save LAYOUT:   two updates, save, a third while that is under way; leaves the outcome in after.pt
load LAYOUT:   load what save left, do the third update, compare
gather LAYOUT: save in megatron's own form for the distributed optimizer, which gathers its state
count LAYOUT:  bytes of tensors that a save takes, and of the files that the ranks write
refuse:        checkpoints of another optimizer and another model
full LAYOUT:   a save whose further file finds a full disk on rank 0, and one whose further file is written
slow LAYOUT:   a save in which rank 1 writes for longer than a collective may take
start LAYOUT:  a policy from Hugging Face's files and one from Megatron's in DIR, one update each: the same bits?
frozen LAYOUT: an update, a save and a load of a policy that trains its attention only
once LAYOUT:   one update and a save; its weights beside it in after.pt
foreign LAYOUT: weights alone, written by megatron-core with other sharding flags ("flags" of the layout)
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.distributed_c10d import _set_pg_timeout

from megatron_tlt.actor.checkpoint_files import read_manifest
from megatron_tlt.config.run import DistributedSection
from megatron_tlt.distributed.world import World
from megatron_tlt.errors import CheckpointError, SaveError
from tests.helpers.memory import live_bytes
from tests.mpi.workers.actor_common import WeightedNll, relative_error, say, sequences, share, train_batch
from tests.mpi.workers.actor_scenario import ADAM, SGD, copy_of, make_policy

MODEL = "qwen3"


def build(world: World, root: Path, layout: dict[str, Any]) -> Any:
    """An Adam policy (SGD, bf16, the distributed optimizer or another model if the layout says so)."""
    section = SGD if layout.pop("sgd", False) else ADAM
    return make_policy(world, root / layout.pop("model", MODEL), section, WeightedNll(), keep_reference=False, **layout)


def update(policy: Any, number: int) -> dict[str, float]:
    """Update `number` of the run, the same data whatever the layout."""
    mine = share(sequences(8, seed=100 + number), policy.dims.dp, policy.groups.at.dp)
    return policy.train_step(train_batch([mine], [120.0])).metrics


def save(world: World, root: Path, checkpoints: Path, layout: dict[str, Any]) -> None:
    """Two updates, save, the third before the writers get going: they must write the state from before it."""
    from megatron_tlt.actor.shard_writer import ThreadWriter

    held: list[tuple[ThreadWriter, Any]] = []
    begin = ThreadWriter.start
    ThreadWriter.start = lambda writer, files: held.append((writer, files))
    policy = build(world, root, dict(layout))
    for number in (1, 2):
        update(policy, number)
    handle = policy.start_save(checkpoints / "step-000002", {"data": [1, 2], "name": "x"}, keep=3)
    ThreadWriter.start = begin
    third = update(policy, 3)
    weights = copy_of(policy.named_weights())
    assert not handle.poll()
    begin(*held[0])
    while not handle.poll():
        time.sleep(0.005)
    if world.is_main:
        torch.save({"weights": weights, "metrics": third}, checkpoints / "after.pt")
    say(world, case="save", layout=layout, version=policy.policy_version)


def gather(world: World, root: Path, checkpoints: Path, layout: dict[str, Any]) -> None:
    """`save` without what `optimizer_shards` puts in the place of megatron's method."""
    from megatron_tlt.actor import optimizer_shards

    ours, optimizer_shards.describe_in_place = optimizer_shards.describe_in_place, lambda optimizer, values_of: None
    save(world, root, checkpoints, layout)
    optimizer_shards.describe_in_place = ours


def count(world: World, root: Path, checkpoints: Path, layout: dict[str, Any]) -> None:
    """What the ranks hold, what they allocate in `start_save`, and what each writes."""
    policy = build(world, root, dict(layout))
    update(policy, 1)
    with live_bytes() as taken:
        handle = policy.start_save(checkpoints / "step-000001", {})
    handle.wait()
    written = (checkpoints / "step-000001" / f"__{world.rank}_0.distcp").stat().st_size
    gradients = sum(b.grad_data.untyped_storage().nbytes() for b in policy.ddp.buffers)
    parameters = sum(p.numel() for p in policy.model.module.parameters())
    ranks = world.all_gather_object({"peak": taken.peak, "written": written, "gradients": gradients})
    say(world, case="count", layout=layout, ranks=ranks, parameters=parameters)


def load(world: World, root: Path, checkpoints: Path, layout: dict[str, Any]) -> None:
    """The third update from the checkpoint."""
    from megatron_tlt.checkpoint.resume import find_checkpoint

    after = torch.load(checkpoints / "after.pt", weights_only=False)
    policy = build(world, root, dict(layout))
    found = find_checkpoint(world, checkpoints, "auto")
    assert found is not None
    extra = policy.load(found)
    third = update(policy, 3)
    weights = copy_of(policy.named_weights())
    say(
        world,
        case="load",
        layout=layout,
        extra=extra,
        version=policy.policy_version,
        same_bits=all(torch.equal(weights[n], t) for n, t in after["weights"].items()),
        weights=relative_error(weights, after["weights"])[0],
        grad_norm=abs(third["grad_norm"] - after["metrics"]["grad_norm"]),
        same_lr=third["lr"] == after["metrics"]["lr"],
    )


def full_disk(world: World, root: Path, checkpoints: Path, layout: dict[str, Any]) -> None:
    """Rank 0's thread cannot write a further file, then rank 0 the metadata; afterwards the same save without error."""
    from megatron_tlt.actor.shard_writer import ThreadWriter

    def no_space(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    policy, errors, finish = build(world, root, dict(layout)), [], ThreadWriter.finish
    for torn in ("more", ".metadata", None):
        files = {"more": no_space if torn == "more" else lambda file: file.write_text("whole")} if world.is_main else {}
        ThreadWriter.finish = no_space if torn == ".metadata" else finish
        try:
            policy.start_save(checkpoints / "step-000001", {}, None, files).wait()
            errors.append("")
        except SaveError as error:
            errors.append(str(error))
            assert not (world.is_main and list(checkpoints.iterdir())), "the space is given back"
        world.barrier()
        found = sorted(path.name for path in checkpoints.iterdir())
    manifest = read_manifest(checkpoints / "step-000001")
    everywhere = world.all_gather_object(errors)
    say(world, case="full", errors=everywhere, found=found, recorded="more" in manifest.files)


def slow(world: World, root: Path, checkpoints: Path, layout: dict[str, Any]) -> None:
    """A collective may take two seconds, and a further file takes rank 1 four."""

    def write(file: Path) -> None:
        time.sleep(4)
        file.write_text("whole")

    policy = build(world, root, dict(layout))
    handle = policy.start_save(checkpoints / "step-000001", {}, None, {"more": write} if world.rank else {})
    _set_pg_timeout(timedelta(seconds=2))
    handle.wait()
    _set_pg_timeout(timedelta(seconds=world.timeout_s))
    say(world, case="slow", recorded="more" in read_manifest(checkpoints / "step-000001").files)


def refuse_other(world: World, root: Path, checkpoints: Path) -> None:
    """Another optimizer, another model."""
    for label, policy in (
        ("sgd", build(world, root, {"sgd": True})),
        ("model", make_policy(world, root / "llama", ADAM, WeightedNll(), keep_reference=False)),
    ):
        try:
            policy.load(checkpoints / "step-000002")
        except CheckpointError as error:
            say(world, case="refuse", label=label, error=str(error))


def start(world: World, root: Path, megatron: Path, layout: dict[str, Any]) -> None:
    """Both ways to start, one update each."""
    seen = []
    try:
        for where in (None, str(megatron)):
            policy = build(world, root, {**layout, "megatron_path": where})
            before = copy_of(policy.named_weights())
            metrics = update(policy, 1)
            seen.append((before, metrics["loss"], metrics["grad_norm"], copy_of(policy.named_weights())))
    except CheckpointError as error:
        say(world, case="start", error=str(error))
        return
    (a, loss_a, norm_a, after_a), (b, loss_b, norm_b, after_b) = seen
    say(
        world,
        case="start",
        same_start=a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a),
        same_loss=(loss_a, norm_a) == (loss_b, norm_b),
        same_after=all(torch.equal(after_a[n], after_b[n]) for n in a),
        moved=all(not torch.equal(b[n], after_b[n]) for n in a),
        grad_norm=norm_b,
    )


def once(world: World, root: Path, checkpoints: Path, layout: dict[str, Any]) -> None:
    """One update, one checkpoint."""
    policy = build(world, root, dict(layout))
    update(policy, 1)
    policy.start_save(checkpoints / "step-000001", {}).wait()
    weights = copy_of(policy.named_weights())
    if world.is_main:
        torch.save(weights, checkpoints / "after.pt")


def frozen(world: World, root: Path, checkpoints: Path, layout: dict[str, Any]) -> None:
    """A policy that trains its attention only: what an update moves, what a save holds, what a load fills."""
    from megatron_tlt.actor import policy as module
    from megatron_tlt.actor.torch_dist_reader import TorchDistReader

    load_weights = module.load_weights

    def load_and_freeze(stage: Any, *rest: Any, **options: Any) -> None:
        load_weights(stage, *rest, **options)
        for name, parameter in stage.named_parameters():
            parameter.requires_grad_("self_attention" in name)

    monitor = mock.Mock()
    world.set_monitor(lambda: monitor)
    with mock.patch.object(module, "load_weights", load_and_freeze):
        policy, other = (build(world, root, dict(layout)) for _ in range(2))
    before = copy_of(policy.named_weights())
    phases, built = [call.args[0] for call in monitor.enter.mock_calls], monitor.report.call_count
    update(policy, 1)
    policy.start_save(checkpoints / "step-000001", {}).wait()
    others = monitor.report.call_count
    other.load(checkpoints / "step-000001")
    after = copy_of(policy.named_weights())
    say(
        world,
        case="frozen",
        phases=phases,
        signs=[built / 2 / len(before), monitor.report.call_count - others],
        moved=sorted({name.split(".")[-2] for name, tensor in after.items() if not torch.equal(tensor, before[name])}),
        kept=sorted({key.split(".")[-2] for key in TorchDistReader(checkpoints / "step-000001").weight_keys()}),
        same=all(torch.equal(tensor, after[name]) for name, tensor in other.named_weights()),
    )


def foreign(world: World, root: Path, directory: Path, layout: dict[str, Any]) -> None:
    """What megatron-core writes for another program: weights under its own choice of keys."""
    from megatron.core import dist_checkpointing

    from megatron_tlt.actor.compat import cpu_as_cuda
    from megatron_tlt.actor.shard_writer import ThreadSaveStrategy

    flags = layout.pop("flags")
    policy = build(world, root, layout)
    strategy = ThreadSaveStrategy()
    metadata = {**flags, "dp_cp_group": policy.groups.dp}
    with cpu_as_cuda():
        state = {"model": policy.model.module.sharded_state_dict(metadata=metadata)}
        dist_checkpointing.save(state, str(directory), strategy, async_sharded_save=True)
        assert strategy.writer is not None
        strategy.writer.start({})
        strategy.writer.join()
        assert strategy.writer.failure is None
        strategy.write_metadata()


VERBS = {"save": save, "load": load, "full": full_disk, "slow": slow, "gather": gather, "count": count}
VERBS |= {"start": start, "once": once, "foreign": foreign, "frozen": frozen}


def main() -> None:
    """Verbs separated by '+', each with its arguments: `save DIR {} + load DIR {}`."""
    world = World.start(DistributedSection(device="cpu"), threads=1)
    root = Path(sys.argv[1])
    for command in " ".join(sys.argv[2:]).split(" + "):
        verb, where, *rest = command.split(" ", 2)
        checkpoints = Path(where)
        if world.is_main:
            checkpoints.mkdir(parents=True, exist_ok=True)
        world.barrier()
        if verb == "refuse":
            refuse_other(world, root, checkpoints)
        else:
            VERBS[verb](world, root, checkpoints, json.loads(rest[0]))
    world.close()


if __name__ == "__main__":
    main()
