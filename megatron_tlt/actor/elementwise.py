"""Elementwise parts of a layer with backward passes of their own: few passes over memory, only inputs are saved.

On a CPU each operation of autograd reads and writes whole activations; recording them for backward took half as
long as the matrix products.

Legend: T packed rows, n heads, d width of a head, F width of the MLP (of this TP rank), H width of a norm.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_tlt.actor.compat import current_device


class Rotate(torch.autograd.Function):
    """RoPE, halves rotated against each other: x [T, 1, n, d], cos [T, 1, 1, d], sin [T, 1, 1, d / 2] -> as x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x1 cos - x2 sin, x2 cos + x1 sin."""
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The rotation back."""
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out, half = x * cos, sin.shape[-1]
    out[..., :half].addcmul_(x[..., half:], sin, value=-1.0)
    out[..., half:].addcmul_(x[..., :half], sin)
    return out


class RMSNormFunction(torch.autograd.Function):
    """x / rms(x) * weight over the last dimension: x [..., H] and weight [H], computed in fp32 whatever their type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Shape and type of `x`."""
        rows = x.reshape(-1, x.shape[-1])
        wide = rows.to(_wide(x))
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = norm.square_().div_(rows.shape[1]).add_(eps).rsqrt_()  # 1 / rms
        ctx.save_for_backward(rows, weight, inverse)
        return (wide * inverse).mul_(weight.to(wide.dtype)).to(x.dtype).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """dx = g w / rms - x sum(g w x) / (H rms^3), dw = sum over rows of g x / rms."""
        rows, weight, inverse = ctx.saved_tensors
        grad, wide, wide_weight = (x.to(_wide(x)) for x in (grads[0].reshape(rows.shape), rows, weight))
        product = grad * wide
        share = (product @ wide_weight)[:, None] * inverse**3 / rows.shape[1]
        grad_weight = inverse[:, 0] @ product
        grad_rows = torch.mul(grad, wide_weight, out=product).mul_(inverse).addcmul_(wide, share, value=-1.0)
        return grad_rows.to(rows.dtype).view(grads[0].shape), grad_weight.to(weight.dtype), None


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up, side by side in `x` [..., 2 F] -> [..., F]."""
    return _SwiGLU.apply(x)  # type: ignore[no-any-return]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        out = torch.empty_like(x)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        scratch = F.silu(gate)
        torch.mul(grads[0], scratch, out=grad_up)
        torch.mul(grads[0], up, out=scratch)
        torch.ops.aten.silu_backward.grad_input(scratch, gate, grad_input=grad_gate)
        return out


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in the signature megatron's layer specs call.

    Also under sequence parallel, which megatron's torch wrapper refuses.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__()
        self.eps = eps
        self.shape = (hidden_size,)
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=current_device()))
        # finalize_model_grads sums the gradients of weights so marked over TP: each rank saw its rows only.
        marked: Any = self.weight
        marked.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as `x`."""
        if x.device.type == "cpu":
            return RMSNormFunction.apply(x, self.weight, self.eps)  # type: ignore[no-any-return]
        return F.rms_norm(x, self.shape, self.weight, self.eps)
