"""The distributed optimizer's state in checkpoints: every rank writes and reads its own range, and nothing is gathered.

megatron's distributed optimizer gives a data-parallel rank one range of each bucket, so of the row-major elements of a
parameter it holds one range too. A checkpoint describes parts of a tensor as boxes (offset and size along each
dimension): a range of a matrix is at most three of them, the end of a row, whole rows, the beginning of a row. The
boxes are views of the optimizer's own tensors; a save copies only this rank's boxes, and a load fills them in place.

megatron-core 0.16.1 has three forms of its own: `fully_reshardable` gathers the state of all replicas (on every rank
over NCCL, or on the first over gloo), `dp_reshardable` can be read under the same TP x PP only, and
`fully_sharded_model_space` can no longer be saved. Names and shapes in the file are those of `fully_reshardable`:
megatron reads these checkpoints, and checkpoints that it wrote are read here.

torch's AdamW (without Transformer Engine and apex, whose FusedAdam is underneath on GPUs) keeps a `step` tensor per
parameter, which megatron does not expect: before the first step it asserts that a state exists (`prime`), and after
loading all parameters share one tensor, which AdamW then increments once per parameter (`separate_steps`).

Remove when megatron-core saves and reshards this state without gathering it, and torch's AdamW with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import megatron_tlt.actor.compat  # noqa: F401  (before megatron)

# isort: split
# megatron comes after compat.
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset and size along each dimension


def describe_in_place(optimizer: Any, values_of: Callable[[Tensor], Tensor]) -> None:
    """Replaces `fully_reshardable`'s gathering in the distributed optimizers, until the next call. Mutates them.

    `values_of`: where the values of a tensor of the state are.
    """
    for part in _parts(optimizer):
        part.sharded_param_state_fully_reshardable = partial(_described, part, values_of)
        part.load_parameter_state_from_fully_reshardable = partial(_filled, part)


def prime(optimizer: Any) -> None:
    """Gives parameters without a state the state that torch's AdamW starts from. Mutates the optimizer."""
    for part in _parts(optimizer):
        for group in part.optimizer.param_groups if _is_torchs(part) else ():
            for parameter in group["params"]:
                if not part.optimizer.state[parameter]:
                    part.optimizer.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }


@contextmanager
def state_read_in_place(optimizer: Any) -> Iterator[None]:
    """Inside, FusedAdam's `load_state_dict` takes its groups only: a load has filled its state in place.

    Transformer Engine's own makes each moment anew, beside the one that was read: 8 bytes a parameter for a moment.
    Mutates the optimizer, until the end.
    """
    fused = [part.optimizer for part in _parts(optimizer) if not _is_torchs(part)]
    for inner in fused:
        inner.load_state_dict = partial(_load_groups, inner)
    try:
        yield
    finally:
        for inner in fused:
            del inner.load_state_dict


def _load_groups(inner: Any, state_dict: dict[str, Any]) -> None:
    state = inner.state
    torch.optim.Optimizer.load_state_dict(inner, {**state_dict, "state": {}})
    inner.state = state


def separate_steps(optimizer: Any) -> None:
    """Gives every parameter of torch's AdamW a step tensor of its own. Mutates the optimizer."""
    for part in _parts(optimizer):
        for state in part.optimizer.state.values() if _is_torchs(part) else ():
            state["step"] = state["step"].clone()


def _parts(optimizer: Any) -> Iterator[Any]:
    return (part for part in optimizer.chained_optimizers if isinstance(part, DistributedOptimizer))


def _is_torchs(part: Any) -> bool:
    return isinstance(part.optimizer, torch.optim.AdamW | torch.optim.Adam)


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The boxes of a tensor that its row-major elements [start, stop) make up, in their order."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # within one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * row, row if start < first * row else 0)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Box]:
    for offset, size in boxes(shape[1:], start, stop):
        yield (row, *offset), (1, *size)


def _described(
    self: Any,
    values_of: Callable[[Tensor], Tensor],
    model_sharded_state_dict: Any,
    is_loading: bool = False,
    metadata: Any = None,
) -> dict[int, dict[str, dict[int, ShardedTensor]]]:
    """This rank's boxes by parameter, name of the state and number. `self` is a DistributedOptimizer."""
    bases, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    of_parameter = {base.data: base for base in nested_values(bases)}
    described = {}
    for index, (parameter, start, stop) in enumerate(_ranges(self)):
        base = of_parameter[parameter]
        described[index] = {
            name: dict(enumerate(_shards(base, f"optimizer.state.{name}", values_of(tensor), start, stop)))
            for name, tensor in _state_of(self, parameter).items()
        }
    return described


def _filled(self: Any, state_dict: dict[int, dict[str, dict[int, Tensor]]]) -> None:
    """Copies what was read to where the state is now: loading its common part may have moved it."""
    for index, (parameter, _, _) in enumerate(_ranges(self)):
        for name, tensor in _state_of(self, parameter).items():
            read = state_dict[index][name]
            parts = tensor.split([read[number].numel() for number in sorted(read)])
            for number, part in enumerate(parts):
                if part.data_ptr() != read[number].data_ptr():
                    part.copy_(read[number].flatten())


def _ranges(optimizer: Any) -> Iterator[tuple[Any, int, int]]:
    """Parameters of which this rank holds state, with the range of their elements."""
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, at in bucket["param_map"].items():
                    yield parameter, at["param"].start, at["param"].end


def _state_of(optimizer: Any, parameter: Any) -> dict[str, Tensor]:
    """Master weights and moments of this rank's range, flat; torch's step counter is saved with the groups."""
    state = optimizer._get_main_param_and_optimizer_states(parameter)
    return {name: tensor.detach() for name, tensor in state.items() if name != "step"}


def _shards(
    base: ShardedTensor | ShardedTensorFactory, prefix: str, flat: Tensor, start: int, stop: int
) -> Iterator[ShardedTensor]:
    """Elements [start, stop) of a parameter as shards of the tensors that `base` stores it in; `flat` are the values.

    A factory stores one parameter in several tensors (gate and up of an MLP). It is applied to a tensor without memory:
    the results' storage offsets are the places of their elements in the parameter.
    """
    assert base.data is not None
    stand_in = torch.empty(base.data.shape, dtype=flat.dtype, device="meta")
    for whole in _tensors_of(base, stand_in):
        assert whole.data is not None and whole.data.is_contiguous()
        begin = whole.data.storage_offset()
        low, high = max(start, begin), min(stop, begin + whole.data.numel())
        values = flat[max(0, low - start) : max(0, high - start)]
        for offset, size in boxes(tuple(whole.local_shape), low - begin, high - begin):
            count = math.prod(size)
            yield _shard(whole, f"{prefix}.{whole.key}", values[:count], offset, size)
            values = values[count:]


def _tensors_of(base: ShardedTensor | ShardedTensorFactory, data: Tensor) -> list[ShardedTensor]:
    """The stored form of a parameter whose values are `data`."""
    if isinstance(base, ShardedTensorFactory):
        return list(nested_values(base.build_fn(base.key, data, base.replica_id, base.flattened_range)))
    return [replace(base, data=data, dtype=data.dtype)]


def _shard(
    whole: ShardedTensor, key: str, values: Tensor, offset: tuple[int, ...], size: tuple[int, ...]
) -> ShardedTensor:
    """One box of `whole`; axes that megatron puts in front (the layer) become dimensions of the box."""
    front = whole.prepend_axis_num
    shape = (1,) * front + size
    assert isinstance(whole.replica_id, tuple)
    return replace(
        whole,
        key=key,
        data=values.view(shape),
        dtype=values.dtype,
        local_shape=shape,
        global_offset=tuple(a + b for a, b in zip(whole.global_offset, (0,) * front + offset, strict=True)),
        axis_fragmentations=None,  # no regular grid
        prepend_axis_num=0,
        replica_id=(*whole.replica_id[:2], 0),  # (PP, TP, DP): each replica has other elements
    )
