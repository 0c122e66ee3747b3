"""The Triton kernel of matrix products in which a row's bits do not depend on the other rows.

One tile for every number of rows: each output is a sum over K in one order, by the same instructions. Rows of padding
are computed and not stored. A narrow matrix has too few tiles for a GPU, so its K is cut into splits: their number
follows from the matrix alone, and their float32 sums are added in order.

Legend: T rows, N columns (rows of the weight), K summed dimension.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_tlt.models.decoders.torch.kernels.experts import sum_parts

# Rows, columns, values of K a step, warps. With 128 rows each byte of weights that comes from the L2 cache serves 128
# products: with 64 a batch of 256 would wait for that cache. Float32 has no tensor cores: rows of padding cost more.
_TILE, _TILE_FP32 = (128, 128, 64, 8), (32, 128, 32, 4)
_PROGRAMS = 132  # of one tile of rows: a processor each on an H100
_LEAST_K = 512  # of a split: shorter ones end before their loads overlap

jit: Any = triton.jit  # the decorator is untyped


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    assert x.is_contiguous() and weight.is_contiguous() and (out is None or out.is_contiguous())
    (rows, k), n = x.shape, weight.shape[0]
    high, wide, step, warps = _TILE_FP32 if x.dtype is torch.float32 else _TILE
    columns = triton.cdiv(n, wide)
    splits = max(1, min(_PROGRAMS // columns, k // _LEAST_K))
    out = x.new_empty(rows, n) if out is None else out
    into = out if splits == 1 else x.new_empty(rows, splits, n, dtype=torch.float32)
    _product[(triton.cdiv(rows, high), columns, splits)](
        *(x, weight, weight if bias is None else bias, into, rows),
        HAS_BIAS=bias is not None,
        N=n,
        K=k,
        ROWS=high,
        COLUMNS=wide,
        STEP=step,
        SPLITS=splits,
        num_warps=warps,
    )
    return out if splits == 1 else sum_parts(into, None, out)


# One program for every number of rows: without it 1 and multiples of 16 would be compiled on their own.
@jit(do_not_specialize=["rows"])
def _product(  # type: ignore[no-untyped-def]
    x, weight, bias, into, rows, HAS_BIAS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """ROWS times COLUMNS of one split, whose first has the bias. Neighbours in the grid share the weight's tile."""
    EACH: tl.constexpr = (K + SPLITS * STEP - 1) // (SPLITS * STEP) * STEP
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    split, at = tl.program_id(2), tl.arange(0, STEP)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if HAS_BIAS:  # noqa: SIM102 - a condition of the compiler around one of the device
        if split == 0:
            total += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    for start in range(split * EACH, tl.minimum(split * EACH + EACH, K), STEP):
        k = start + at
        a = tl.load(x + row[:, None] * K + k[None, :], mask=(row < rows)[:, None] & (k < K)[None, :], other=0.0)
        there = (k < K)[:, None] & (column < N)[None, :]
        b = tl.load(weight + column[None, :] * K + k[:, None], mask=there, other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    target = into + (row[:, None] * SPLITS + split) * N + column[None, :]
    tl.store(target, total.to(into.dtype.element_ty), mask=(row < rows)[:, None] & (column < N)[None, :])
