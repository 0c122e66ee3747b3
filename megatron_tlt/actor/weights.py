"""Hugging Face tensors into a stage's shards, and shards back to full named tensors, over any TP x PP x EP.

Export, drawn; every rank walks the same list of slots, so the collectives match:

    owning stage, each TP rank:  shard --all-gather over TP--> full tensor --broadcast over PP--> everyone

Stacks of experts are gathered over EP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_tlt.actor.groups import ActorGroups
from megatron_tlt.actor.hf_names import Slot, shard, slots, unshard
from megatron_tlt.errors import CheckpointError
from megatron_tlt.models.hf.config import ModelConfig


def load_weights(
    module: nn.Module,
    config: ModelConfig,
    groups: ActorGroups,
    read: Callable[[str], Tensor],
    which: Iterable[Slot] | None = None,
    on_tensor: Callable[[], object] = lambda: None,
) -> None:
    """Copies this rank's shards of the full Hugging Face tensors that `read(name)` returns. Mutates `module`.

    `which`: of these parameters (`adapter_slots`); default: of the model's. One parameter's tensors are in memory at a
    time, and no tensor of another stage is read. `on_tensor` is called before each one is read.
    """

    def read_next(name: str) -> Tensor:
        on_tensor()
        return read(name)

    parameters = dict(module.named_parameters())
    for slot in slots(config, groups.dims.pp) if which is None else which:
        if slot.stage != groups.at.pp:
            continue
        parameter = _find(parameters, slot)
        rank = groups.ep.rank() if slot.kind == "experts" else groups.at.tp
        part = shard(config, slot, [read_next(name) for name in slot.hf_names], rank, _parts(slot, groups))
        if parameter.shape != part.shape:
            raise CheckpointError(
                f"{slot.hf_names}: shard {tuple(part.shape)} for a parameter {tuple(parameter.shape)}"
            )
        with torch.no_grad():
            parameter.copy_(part)


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that updates move, by megatron's name. Gradient buffers and optimizer hold these, and of the
    model's parameters a checkpoint holds no others.
    """
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def value_of(parameter: nn.Parameter) -> Tensor:
    """The tensor that weight sync and export read for a parameter, in its shape. May be made for this call.

    Of a weight with adapters the merged one (`lora.py`).
    """
    merged = getattr(parameter, "merged", None)
    return parameter.data if merged is None else merged()  # type: ignore[no-any-return]


def mark_shards(module: nn.Module, groups: ActorGroups, which: Iterable[Slot]) -> None:
    """Marks parameters that TP cuts, as megatron's initialisation does (we skip that: weights are loaded).

    Without the mark megatron takes a shard for a duplicate and silently leaves it out of the gradient norm. Experts
    are marked, too, though TP does not cut them, or the norm takes TP rank 1's for copies. `allreduce` False reduces
    their gradients over the replicas of experts; with EP 1 megatron leaves it True, and then TP ranks, which have
    different tokens, never add them up, and the optimizer of such a checkpoint has fewer parts than another's.
    """
    parameters = dict(module.named_parameters())
    for slot in which:
        if slot.stage == groups.at.pp and slot.kind != "replicated":
            parameter: Any = _find(parameters, slot)
            parameter.tensor_model_parallel = True
            parameter.partition_dim = 1 if slot.kind == "columns" else 0
            parameter.partition_stride = 1
            if slot.kind == "experts":
                parameter.allreduce = False


def mark_partial(module: nn.Module, groups: ActorGroups, adapters: Iterable[Slot]) -> None:
    """Marks factors that every TP rank holds and gets a part of the gradient of; see `lora.finalize_gradients`."""
    if groups.dims.tp > 1:
        parameters = dict(module.named_parameters())
        for slot in adapters:
            if slot.stage == groups.at.pp and slot.kind == "replicated":
                parameter: Any = _find(parameters, slot)
                parameter.partial_over = groups.tp


def _parts(slot: Slot, groups: ActorGroups) -> int:
    """The number of ranks that a parameter is cut over."""
    return groups.dims.ep if slot.kind == "experts" else groups.dims.tp


def _find(parameters: dict[str, nn.Parameter], slot: Slot) -> nn.Parameter:
    for path in slot.paths:
        if path in parameters:
            return parameters[path]
    raise CheckpointError(f"the model has no parameter for {slot.hf_names}: looked for {slot.paths}")


def named_tensors(
    module: nn.Module,
    config: ModelConfig,
    groups: ActorGroups,
    read: Callable[[nn.Parameter], Tensor],
) -> Iterator[tuple[str, Tensor]]:
    """`read(parameter)` of every parameter as full Hugging Face tensors, in one order on every rank.

    Collective. `read` gives a tensor of the parameter's shape (`value_of`, its gradient, ...), of one type over all
    parameters. A yielded tensor may be a view of the parameter or made from several: use it before the next step, and
    do not write to it. At most one parameter is held in full at a time.
    """
    parameters, shapes = dict(module.named_parameters()), config.parameter_shapes()
    which = slots(config, groups.dims.pp)
    sample = read(next(_find(parameters, slot) for slot in which if slot.stage == groups.at.pp))
    for slot in which:
        if not slot.exported:
            continue
        if slot.stage == groups.at.pp:
            parts = _gather(read(_find(parameters, slot)).detach(), slot, groups)
            full = unshard(config, slot, parts)
        else:
            full = [torch.empty(shapes[name], dtype=sample.dtype, device=sample.device) for name in slot.hf_names]
        for name, tensor in zip(slot.hf_names, full, strict=True):
            yield name, _from_stage(tensor, slot.stage, groups)


def _gather(part: Tensor, slot: Slot, groups: ActorGroups) -> list[Tensor]:
    if (count := _parts(slot, groups)) == 1 or slot.kind == "replicated":
        return [part]
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(count)]
    dist.all_gather(parts, part, group=groups.ep if slot.kind == "experts" else groups.tp)
    return parts


def _from_stage(tensor: Tensor, stage: int, groups: ActorGroups) -> Tensor:
    if groups.dims.pp == 1:
        return tensor
    tensor = tensor.contiguous()
    dist.broadcast(tensor, src=groups.pipeline[stage], group=groups.pp)
    return tensor
