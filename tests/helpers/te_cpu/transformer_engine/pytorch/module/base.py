"""How weights' gradients come to megatron's gradient buffers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """What autograd gets for a weight whose gradient is in the buffer already. NaN, as nothing may read it."""
    return torch.full(shape, 0.0 if zero else float("nan"), dtype=dtype)


class WeightProduct(torch.autograd.Function):
    """x weight^T. With `fuse` the weight's gradient is added to `weight.main_grad`; the first one overwrites it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, fuse: bool, is_first: bool | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.fuse, ctx.is_first = weight, fuse, is_first
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        dx, dw = grads[0] @ weight, None
        if weight.requires_grad:
            dw = grads[0].flatten(0, -2).t() @ x.flatten(0, -2)
            if ctx.fuse:
                main = weight.main_grad
                main.copy_(dw) if ctx.is_first else main.add_(dw)
                weight.grad_added_to_main_grad = True
                dw = get_dummy_wgrad(list(main.shape), weight.dtype)
        return dx, dw, None, None
