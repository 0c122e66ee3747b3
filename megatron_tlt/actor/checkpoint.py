"""Checkpoints of the policy: megatron's distributed format, written in the background, all or nothing.

One save, drawn (all lines are collective, except the threads):

    start_save   plan together, copy this rank's share to the host ---> a thread on every rank writes and syncs its file
    poll / wait  has every rank's thread ended? --> metadata --> rank 0: manifest, sync, rename, `latest`

Replicas divide what they have in common; state that the distributed optimizer divides stays where it is (see
`optimizer_shards.py`). So a save takes no memory on the device, and on the host what this rank writes.
Reading goes through megatron's `load`, so another TP x PP x DP can read what this one wrote.
"""

from __future__ import annotations

import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron_tlt.actor import checkpoint_files as files
from megatron_tlt.actor import optimizer_shards
from megatron_tlt.actor.checkpoint_files import Manifest
from megatron_tlt.actor.compat import cpu_as_cuda, current_device, load_numbers_only
from megatron_tlt.actor.groups import ActorGroups
from megatron_tlt.actor.lora import FACTORS
from megatron_tlt.actor.shard_writer import ThreadSaveStrategy
from megatron_tlt.actor.torch_dist_reader import METADATA, TorchDistReader, read_metadata
from megatron_tlt.actor.weights import trainable
from megatron_tlt.distributed.together import together
from megatron_tlt.distributed.world import World
from megatron_tlt.errors import CheckpointError, SaveError
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.observe.files import sync

# isort: split
# megatron comes after compat.
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

# Layers' FP8 scales: written for other programs and never read, since layers of another kind have others.
_EXTRA_STATE = "_extra_state"
# Without torch's own text, which recommends to try again without the protection.
_REFUSED = "checkpoint {} holds more than numbers (weights_only would not open it): nothing of it was run"
# Words of torch's archive writer in a RuntimeError: a write failed.
_ARCHIVE = ("basic_ios", "PytorchStreamWriter", "inline_container")
_SMALL_FILES = 1 << 16  # bytes: common.pt takes less
_POLL_S = 0.2  # between two looks at the other ranks' writers
_WAITS = 3  # times of a collective after which a writer hangs; `watchdog.hang_s` has the same


def start_save(
    world: World,
    module: Any,
    optimizer: Any,
    groups: ActorGroups,
    directory: Path,
    manifest: Manifest,
    keep: int | None,
    files_of_rank: Mapping[str, Callable[[Path], None]],
    values_of: Callable[[Tensor], Tensor],
) -> SaveHandle:
    """Begins to save; returns when the state is copied and training may go on. Collective.

    `values_of`: where the values of a tensor of the state are to be read, on any device. `files_of_rank`: writers of
    this rank's other files, by file name; may be called until the handle is done. The handle must be polled or waited
    for by all ranks together before the next save. Raises SaveError where the first rank cannot write.
    """
    began, scratch = time.monotonic(), files.scratch_of(directory)
    with _saving_together(world), _disk_errors(world, directory):
        if world.is_main:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
            # On a full disk megatron's write of common.pt would give no reason, and other ranks would wait for it.
            (scratch / "probe").write_bytes(os.urandom(_SMALL_FILES))
            sync(scratch / "probe")
            (scratch / "probe").unlink()
    strategy = ThreadSaveStrategy()
    with cpu_as_cuda(), _disk_errors(world, directory):
        dist_checkpointing.save(
            sharded_state(module, optimizer, groups, values_of),
            str(scratch),
            FullyParallelSaveStrategyWrapper(strategy, groups.dp),  # replicas divide what all of them hold
            async_sharded_save=True,
            content_metadata={"format": "torch_dist"},
        )
    assert strategy.writer is not None
    strategy.writer.start(files_of_rank)
    return SaveHandle(world, directory, manifest, strategy, keep, began)


@contextmanager
def _saving_together(world: World) -> Iterator[None]:
    """As `together`; what every rank raises is a SaveError."""
    try:
        with together(world):
            yield
    except CheckpointError as error:
        raise SaveError(str(error)) from error


@contextmanager
def _disk_errors(world: World, directory: Path) -> Iterator[None]:
    """Around what the first rank writes: an error of the disk is a CheckpointError, and the space is given back."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(word in str(error) for word in _ARCHIVE):
            raise  # of a collective
        if world.is_main:
            shutil.rmtree(files.scratch_of(directory), ignore_errors=True)
        raise CheckpointError(f"cannot write {directory}: {error}") from error


class SaveHandle:
    """A save under way. `poll` and `wait` are collective: all ranks call them at the same place."""

    def __init__(
        self,
        world: World,
        directory: Path,
        manifest: Manifest,
        strategy: ThreadSaveStrategy,
        keep: int | None,
        began: float,
    ):
        """`began`: by `time.monotonic`."""
        self.directory, self.done = directory, False
        self.seconds = 0.0
        """Of the slowest rank until it had written, and of publishing; the same on every rank, once it is published."""
        self._began = began
        assert strategy.writer is not None, "see `start_save`"
        self._world, self._manifest, self._keep = world, manifest, keep
        self._strategy, self._writer = strategy, strategy.writer

    def poll(self) -> bool:
        """Publishes the checkpoint if every rank has written its part; whether it is published.

        Takes microseconds if it is not. Raises SaveError on every rank if any rank could not write.
        """
        if not self.done:
            flag = torch.tensor(int(self._writer.is_done()), device=current_device())
            dist.all_reduce(flag, op=dist.ReduceOp.MIN)
            if int(flag):
                self._publish()
        return self.done

    def wait(self) -> None:
        """Publishes the checkpoint once all writers are done. Raises SaveError as `poll` does.

        One rank's may take longer than a collective may; one that takes `_WAITS` times as long raises CheckpointError,
        on that rank alone.
        """
        end = time.monotonic() + _WAITS * self._world.timeout_s
        while not self.poll():
            self._writer.join(_POLL_S)
            if time.monotonic() > end and not self._writer.is_done():
                late = f"its writer has not ended in {_WAITS} times distributed.timeout_s"
                raise CheckpointError(f"cannot write {self.directory}: {late}")

    def _publish(self) -> None:
        publishing = time.monotonic()
        mine = self._writer.failure, self._writer.records, self._writer.ended_at - self._began
        report = self._world.all_gather_object(mine)
        failures = [f"rank {rank}: {failure}" for rank, (failure, *_) in enumerate(report) if failure]
        if failures:
            if self._world.is_main:  # leaves room on a full disk for the run's logs
                shutil.rmtree(files.scratch_of(self.directory), ignore_errors=True)
            raise SaveError(f"cannot write {self.directory}: {'; '.join(failures)}")
        written = {name: record for _, records, _ in report for name, record in records.items()}
        manifest = replace(self._manifest, files=written)
        with _saving_together(self._world), _disk_errors(self._world, self.directory):
            self._strategy.write_metadata()
            if self._world.is_main:
                files.publish(self.directory, manifest, self._keep)
        published_in = self._world.broadcast_object(time.monotonic() - publishing)
        self.seconds = max(seconds for *_, seconds in report) + published_in
        self.done = True


def sharded_state(
    module: Any, optimizer: Any, groups: ActorGroups, values_of: Callable[[Tensor], Tensor] | None
) -> dict[str, Any]:
    """megatron's description of the parts of global tensors that this rank holds, of `trainable` parameters.

    `values_of`: see `start_save`; None to load, into the state itself.
    """
    metadata = _metadata(groups)
    loading = values_of is None
    read = values_of or (lambda tensor: tensor)
    optimizer_shards.prime(optimizer)
    optimizer_shards.describe_in_place(optimizer, read)
    frozen = {name for name, _ in module.named_parameters()} - trainable(module).keys()
    whole = module.sharded_state_dict(metadata=metadata)
    kept = {name for name in whole if not (loading and name.endswith(_EXTRA_STATE))} - frozen
    model = {name: part for name, part in whole.items() if name in kept}
    state = optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
    for part in nested_values(extract_sharded_tensors_and_factories(state)[0]):
        part.data = read(part.data)
    return {"model": model, "optimizer": state}


def _metadata(groups: ActorGroups) -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": groups.dp,
    }


def load_policy(world: World, module: Any, optimizer: Any, groups: ActorGroups, directory: Path) -> None:
    """Fills model and optimizer from a checkpoint of any layout, its checksums unverified. Collective.

    A sign of life a tensor. Nothing in the checkpoint is unpickled. Raises CheckpointError.
    """
    with cpu_as_cuda(), _no_pickles(world, directory):
        state = dist_checkpointing.load(sharded_state(module, optimizer, groups, None), str(directory))
        left_out = module.load_state_dict(state["model"], strict=False)
        assert not left_out.unexpected_keys and not trainable(module).keys() & set(left_out.missing_keys)
        with optimizer_shards.state_read_in_place(optimizer):
            optimizer.load_state_dict(state["optimizer"])
        optimizer_shards.separate_steps(optimizer)


@contextmanager
def _no_pickles(world: World, directory: Path) -> Iterator[None]:
    """While megatron loads `directory`: CheckpointError for anything that is not numbers, or cannot be read; a sign of
    life before each tensor.

    torch unpickles .metadata without a check, so it is read here first, by an unpickler that builds torch's records
    only. Use from one thread.
    """
    read_metadata(directory / METADATA)
    try:
        with load_numbers_only(world.heartbeat):
            yield
    except pickle.UnpicklingError as error:
        raise CheckpointError(_REFUSED.format(directory)) from error
    except CheckpointException as error:  # an error on any rank; torch derives it from BaseException
        failures = [failure for failure, _ in error.failures.values()]
        if any(isinstance(failure, pickle.UnpicklingError) for failure in failures):
            raise CheckpointError(_REFUSED.format(directory)) from error
        raise CheckpointError(f"checkpoint {directory} cannot be read: {failures[0]}") from error


def load_model(world: World, module: Any, groups: ActorGroups, path: str, config: ModelConfig) -> None:
    """Fills a stage's weights from a Megatron checkpoint of any layout; no optimizer. Mutates `module`. Collective.

    Names and shapes are compared with `config` first, and checksums if the checkpoint has our manifest. A sign of life
    a tensor. Raises CheckpointError.
    """
    with together(world):
        source = TorchDistReader(path)
        directory = source.directory
        source.check(config)
        if source.manifest():
            damage = files.damage_of(directory, world.rank, world.size, on_file=world.heartbeat)
            if damage is not None:
                raise CheckpointError(damage)
    with cpu_as_cuda(), _no_pickles(world, directory):
        keys = {"non_homogeneous_layers": source.has_tensor_a_layer}
        wanted = module.sharded_state_dict(metadata=_metadata(groups) | keys)
        left = (_EXTRA_STATE, *FACTORS)  # adapters come later
        weights = {name: part for name, part in wanted.items() if not name.endswith(left)}
        state = dist_checkpointing.load({"model": weights}, str(directory))
        left_out = module.load_state_dict(state["model"], strict=False)
    missing = [name for name in left_out.missing_keys if not name.endswith(left)]
    if missing or left_out.unexpected_keys:
        raise CheckpointError(f"{directory}: missing {missing}, unexpected {left_out.unexpected_keys}")
