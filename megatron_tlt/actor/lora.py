"""LoRA (Hu et al., arXiv 2106.09685): linear layers whose frozen weight W acts as W + s B A, s = alpha / rank.

A forward pass multiplies by the merged weight, which is made for the product and freed: the update sees the numbers
that a weight sync sends to the engine, rounded as there. Beside W x + s B (A x) the two differ by the rounding of the
sum. A backward pass needs neither the merged weight nor the gradient of W:

    dx = dy W + s (dy B) A        dB = s dy^T (x A^T)        dA = s (dy B)^T x

Each matrix of a checkpoint has a pair of its own, also where megatron holds several in one parameter (q, k, v by
key/value group; gate above up), so names, ranks and files are those of PEFT and the engines. TP cuts B with the rows
of W (column-parallel) and A with its columns (row-parallel). The factor that every TP rank holds gets from each one
a part of its gradient; `finalize_gradients` adds these up. Experts: `experts.py`.

Legend: r rank, T rows, in / out columns and rows of W on this rank, G groups of rows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_tlt.actor.compat import current_device
from megatron_tlt.actor.hf_names import Slot
from megatron_tlt.config.actor import LoraSection
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.peft import peft_reader

# isort: split
# megatron comes after compat.
from megatron.core.distributed import finalize_model_grads
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

FACTORS = ("lora_A", "lora_B")


class Adapter(nn.Module):
    """lora_A [..., r, in] and lora_B [..., out, r] of the rows [start, stop) of each group of a weight."""

    def __init__(self, shape: Sequence[int], rank: int, rows: tuple[int, int], dtype: torch.dtype):
        """`shape` [..., out, in] of the matrix on this rank. The factors are loaded or drawn by name later."""
        super().__init__()
        *lead, outputs, inputs = shape
        made: dict[str, Any] = {"dtype": dtype, "device": current_device()}
        self.rows = slice(*rows)
        self.lora_A = nn.Parameter(torch.empty(*lead, rank, inputs, **made))
        self.lora_B = nn.Parameter(torch.empty(*lead, outputs, rank, **made))


class AdaptedWeight:
    """A frozen weight [..., G * n, in] and the adapters of its matrices, which each have the same rows of every group.

    The weight's `merged` is `value`, for weight sync and export (`weights.value_of`).
    """

    def __init__(self, weight: nn.Parameter, adapters: Sequence[Adapter], scale: float, groups: int = 1):
        self.weight, self.adapters, self.scale, self.groups = weight, adapters, scale, groups
        self.is_on = True
        """Off: the weight acts alone, as the reference policy."""
        marked: Any = weight
        marked.merged = self.value

    @property
    def factors(self) -> list[Tensor]:
        """A and B of each adapter in turn."""
        return [factor for adapter in self.adapters for factor in (adapter.lora_A, adapter.lora_B)]

    def value(self) -> Tensor:
        """W + s B A in the weight's shape and type, made for this call; the weight's own data without an adapter."""
        if not self.adapters or not self.is_on:
            return self.weight.data
        out = self.weight.data.clone()
        by_group = out.unflatten(-2, (self.groups, -1))
        for adapter in self.adapters:
            change = adapter.lora_B.data @ adapter.lora_A.data
            by_group[..., adapter.rows, :].add_(change.unflatten(-2, (self.groups, -1)), alpha=self.scale)
        return out

    def gradients(
        self,
        grad: Tensor,
        x: Tensor,
        down: Callable[[Tensor, Tensor], Tensor],
        outer: Callable[[Tensor, Tensor], Tensor],
    ) -> tuple[Tensor, list[Tensor]]:
        """dx [T, in] and the gradients of `factors`, from dy [T, out] and x [T, in].

        `down(y, M)` is y M, `outer(y, z)` is y^T z, both with the weight's leading dimensions.
        """
        dx = down(grad, self.weight.data)
        by_group = grad.unflatten(1, (self.groups, -1))
        found: list[Tensor] = []
        for adapter in self.adapters:
            part = by_group[:, :, adapter.rows].flatten(1)
            A, B = adapter.lora_A.data, adapter.lora_B.data
            low = down(part, B) * self.scale  # [T, r]
            dx += down(low, A)
            found += [outer(low, x), outer(part, down(x, A.transpose(-1, -2)) * self.scale)]
        return dx, found


class _AdaptedProduct(torch.autograd.Function):
    """x W'^T + bias, W' the merged weight. With a TP `group`: x of all its ranks' rows, or the same on each."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        adapted: AdaptedWeight,
        bias: Tensor | None,
        group: Any,
        gathers: bool,
        *_: Tensor,
    ) -> Tensor:
        ctx.adapted, ctx.group, ctx.gathers = adapted, group, gathers
        ctx.save_for_backward(x)
        return nn.functional.linear(_gathered(x, group, gathers), adapted.value(), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        rows, grad = (t.flatten(0, -2) for t in (_gathered(x, ctx.group, ctx.gathers), grads[0]))
        dx, found = ctx.adapted.gradients(grad, rows, torch.matmul, lambda y, z: y.t() @ z)
        dx = dx.view(*grads[0].shape[:-1], -1)
        if ctx.gathers:
            dx = reduce_scatter_to_sequence_parallel_region(dx, group=ctx.group)
        elif ctx.group is not None:
            dx = reduce_from_tensor_model_parallel_region(dx, group=ctx.group)
        return dx, None, None, None, None, *found


def _gathered(x: Tensor, group: Any, gathers: bool) -> Tensor:
    return gather_from_sequence_parallel_region(x, group=group) if gathers else x


class AdaptedColumnLinear(ColumnParallelLinear):
    """megatron's column-parallel layer with an adapter for each matrix in it that is a target."""

    def __init__(self, inputs: int, outputs: int, *, lora: LoraSection, matrices: tuple[str, ...], **options: Any):
        """`matrices`: names of those in its weight, (q, k, v) by key/value group, or (gate, up)."""
        super().__init__(inputs, outputs, **options)
        config, tp = options["config"], self.tp_group.size()
        if len(matrices) == 3:
            groups, d = config.num_query_groups // tp, config.kv_channels
            heads = config.num_attention_heads // config.num_query_groups
            bounds = [0, heads * d, (heads + 1) * d, (heads + 2) * d]
        else:
            groups, half = 1, self.output_size_per_partition // 2
            bounds = [0, half, 2 * half]
        made: dict[str, Adapter] = {
            name: Adapter((groups * (stop - start), inputs), lora.rank, (start, stop), config.params_dtype)
            for name, (start, stop) in zip(matrices, pairwise(bounds), strict=True)
            if name in lora.targets
        }
        self.adapted = _adapted(self, made, lora.scale, groups)

    def forward(self, input_: Tensor, weight: Any = None, runtime_gather_output: Any = None) -> tuple[Tensor, None]:
        """[T, 1, in] ([T / tp, 1, in] under sequence parallel) -> [T, 1, out], and no bias."""
        group = self.tp_group if self.tp_group.size() > 1 else None
        factors = self.adapted.factors
        out = _AdaptedProduct.apply(input_, self.adapted, self.bias, group, self.sequence_parallel, *factors)
        return out, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """As megatron's; B is cut with the weight's rows."""
        return _sharded(self, {"weight": 0, "bias": 0}, "lora_B", 0, prefix, sharded_offsets, metadata)


class AdaptedRowLinear(RowParallelLinear):
    """megatron's row-parallel layer with an adapter."""

    def __init__(self, inputs: int, outputs: int, *, lora: LoraSection, matrices: tuple[str, ...], **options: Any):
        """`matrices`: the name of the one in its weight."""
        super().__init__(inputs, outputs, **options)
        made: dict[str, Adapter] = {
            name: Adapter(self.weight.shape, lora.rank, (0, outputs), options["config"].params_dtype)
            for name in matrices
            if name in lora.targets
        }
        self.adapted = _adapted(self, made, lora.scale)

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """[T, 1, in] -> [T, 1, out] ([T / tp, 1, out] under sequence parallel), and no bias."""
        out = _AdaptedProduct.apply(input_, self.adapted, None, None, False, *self.adapted.factors)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(out, group=self.tp_group), None
        return reduce_from_tensor_model_parallel_region(out, group=self.tp_group), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """As megatron's; A is cut with the weight's columns."""
        return _sharded(self, {"weight": 1}, "lora_A", 1, prefix, sharded_offsets, metadata)


def _adapted(layer: Any, made: dict[str, Adapter], scale: float, groups: int = 1) -> AdaptedWeight:
    """The layer's weight with adapters, which become its modules."""
    for name, adapter in made.items():
        layer.add_module(name, adapter)
    return AdaptedWeight(layer.weight, list(made.values()), scale, groups)


def _sharded(
    layer: Any,
    axes: dict[str, int],
    cut: str,
    axis: int,
    prefix: str,
    offsets: tuple[Any, ...],
    metadata: Any,
) -> dict[str, Any]:
    return make_sharded_tensors_for_checkpoint(  # type: ignore[no-any-return]
        layer.state_dict(prefix="", keep_vars=True),
        prefix,
        {**axes, **{f"{name}.{cut}": axis for name, _ in layer.named_children()}},
        offsets,
        tp_group=layer.tp_group,
        dp_cp_group=metadata["dp_cp_group"],
    )


def freeze_base(module: nn.Module) -> None:
    """Only adapters take gradients from now on. Mutates the stage.

    The embedding's output takes them, too: megatron's recompute of the first layer has no gradients otherwise.
    """
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.endswith(FACTORS))
    embedding: Any = getattr(module, "embedding", None)
    if embedding is not None:
        embedding.register_forward_hook(lambda _module, _args, out: out.requires_grad_() if out.is_leaf else out)


def factor_reader(
    lora: LoraSection, config: ModelConfig, adapters: Mapping[Slot, tuple[int, ...]], seed: int
) -> Callable[[str], Tensor]:
    """Reads the factors that training starts from, by name: of `lora.adapter_path`, or the first ones.

    Those are B zero, A uniform within 1 / sqrt(in), as in PEFT, each drawn whole, from `seed` and its name: the same
    in every layout. Raises CheckpointError.
    """
    shapes = {slot.hf_names[0]: shape for slot, shape in adapters.items()}
    if lora.adapter_path is not None:
        return peft_reader(lora, config, shapes)

    def draw(name: str) -> Tensor:
        shape = shapes[name]
        if ".lora_B" in name:
            return torch.zeros(shape)
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        bound = 1 / math.sqrt(shape[-1])
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)

    return draw


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Inside, the stage is the base policy. For passes without gradients."""
    adapted = [parameter.merged.__self__ for parameter in module.parameters() if hasattr(parameter, "merged")]
    for weight in adapted:
        weight.is_on = False
    try:
        yield
    finally:
        for weight in adapted:
            weight.is_on = True


def finalize_gradients(models: list[Any], *args: Any, **options: Any) -> None:
    """megatron's `finalize_model_grads`, then the sum over TP of factors that each TP rank has a part of. Collective.

    Megatron's own sums are for norms under sequence parallel, which are partial for another reason.
    """
    finalize_model_grads(models, *args, **options)
    for model in models:
        marked = [p for p in model.parameters() if getattr(p, "partial_over", None) is not None]
        if not marked:
            continue
        flat = torch.cat([p.main_grad.flatten() for p in marked])
        dist.all_reduce(flat, group=marked[0].partial_over)
        for parameter, part in zip(marked, flat.split([p.numel() for p in marked]), strict=True):
            parameter.main_grad.copy_(part.view_as(parameter))
