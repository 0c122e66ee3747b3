"""The Triton kernels between the matrix products of a layer; `decoders.torch.layers` is their reference.

Each reads its inputs once and writes its outputs once: sums in float32, values of the model's type. A row's bits do not
depend on the other rows. `INVARIANT` has products and experts of which that is true, too (`rollout.numerics`).

Legend: T rows, H hidden size, I MLP width, Hq/Hkv query and kv heads, D head size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_tlt.models.decoders.torch.kernels.experts import mix_experts, route
from megatron_tlt.models.decoders.torch.kernels.products import product
from megatron_tlt.models.decoders.torch.kernels.sampling import best_candidates
from megatron_tlt.models.decoders.torch.layers import PLAIN, HeadNorms, LayerOps

_WIDTH = 1024  # elements of the MLP's width a program

jit: Any = triton.jit  # the decorator is untyped


def add_norm(x: Tensor, part: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    assert x.is_contiguous() and (part is None or part.is_contiguous())
    rows, hidden = x.shape
    total, normed = (x if part is None else torch.empty_like(x)), torch.empty_like(x)
    block = triton.next_power_of_2(hidden)
    _add_norm[(rows,)](
        *(x, x if part is None else part, weight, total, normed, eps),
        HAS_PART=part is not None,
        H=hidden,
        N=block,
        num_warps=max(1, min(8, block // 256)),
    )
    return total, normed


def rotate_into(qkv: Tensor, norms: HeadNorms | None, rope: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
    assert qkv.is_contiguous() and rope.is_contiguous() and cache[0].is_contiguous()
    (rows, width), (kv_heads, d) = qkv.shape, cache.shape[-2:]
    heads = width // d - 2 * kv_heads
    q = torch.empty(rows, heads, d, dtype=qkv.dtype, device=qkv.device)
    q_norm, k_norm, eps = (rope, rope, 0.0) if norms is None else norms  # not read where there are none
    _rotate_into[(rows, heads + 2 * kv_heads)](
        *(qkv, q_norm, k_norm, rope, slots, q, cache[0], cache[1], eps),
        HAS_NORMS=norms is not None,
        HEADS=heads,
        KV=kv_heads,
        D=d,
        N=triton.next_power_of_2(d // 2),
        num_warps=1,
    )
    return q


def gated_silu(gate_up: Tensor) -> Tensor:
    assert gate_up.is_contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    _gated_silu[(rows, triton.cdiv(width, _WIDTH))](gate_up, out, width, N=_WIDTH)
    return out


FUSED = LayerOps(PLAIN.product, add_norm, rotate_into, gated_silu, route, mix_experts, best_candidates)
INVARIANT = FUSED._replace(product=product, mix_experts=partial(mix_experts, is_invariant=True))


@jit
def _add_norm(  # type: ignore[no-untyped-def]
    x, part, weight, total, normed, eps, HAS_PART: tl.constexpr, H: tl.constexpr, N: tl.constexpr
):
    """One row."""
    at = tl.arange(0, N)
    here, mask = tl.program_id(0).to(tl.int64) * H + at, at < H
    wide = tl.load(x + here, mask=mask, other=0.0).to(tl.float32)
    if HAS_PART:
        wide += tl.load(part + here, mask=mask, other=0.0).to(tl.float32)
        rounded = wide.to(total.dtype.element_ty)
        tl.store(total + here, rounded, mask=mask)
        wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)
    factor = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed + here, (wide * scale * factor).to(normed.dtype.element_ty), mask=mask)


@jit
def _rotate_into(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    qkv, q_norm, k_norm, rope, slots, q, keys, values, eps, HAS_NORMS: tl.constexpr, HEADS: tl.constexpr,
    KV: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One row's query, key or value head: heads are numbered as the row holds them."""
    row, head, at = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, N)
    HALF: tl.constexpr = D // 2
    mask, source = at < HALF, qkv + (row * (HEADS + 2 * KV) + head) * D
    low = tl.load(source + at, mask=mask, other=0.0)
    high = tl.load(source + HALF + at, mask=mask, other=0.0)
    slot = tl.load(slots + row).to(tl.int64)
    if head >= HEADS + KV:
        target = values + (slot * KV + head - HEADS - KV) * D
        tl.store(target + at, low, mask=mask)
        tl.store(target + HALF + at, high, mask=mask)
        return
    a, b = low.to(tl.float32), high.to(tl.float32)
    if HAS_NORMS:
        scale = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / D + eps)
        weight = q_norm if head < HEADS else k_norm
        factor_a = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
        factor_b = tl.load(weight + HALF + at, mask=mask, other=0.0).to(tl.float32)
        a = (a * scale * factor_a).to(low.dtype).to(tl.float32)
        b = (b * scale * factor_b).to(low.dtype).to(tl.float32)
    cos = tl.load(rope + row * D + at, mask=mask, other=0.0)
    sin = tl.load(rope + row * D + HALF + at, mask=mask, other=0.0)
    if head < HEADS:
        target = q + (row * HEADS + head) * D
    else:
        target = keys + (slot * KV + head - HEADS) * D
    tl.store(target + at, (a * cos - b * sin).to(low.dtype), mask=mask)
    tl.store(target + HALF + at, (b * cos + a * sin).to(low.dtype), mask=mask)


@jit
def _gated_silu(gate_up, out, width, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """N elements of one row."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * N + tl.arange(0, N)
    mask = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=mask, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=mask, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * width + at, (silu * up).to(gate.dtype), mask=mask)
