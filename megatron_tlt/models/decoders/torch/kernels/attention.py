"""The Triton kernel of paged attention: flash decoding over block tables (`paged.py`).

Scores are folded block by block with a running maximum and sum in float32 (Milakov and Gimelshein, arXiv 1805.02867);
splits of the context are combined afterwards by the same rule. Products are of the cache's type, summed in float32;
of float32 inputs they are float32 throughout (no TF32). It runs without a GPU in Triton's interpreter
(TRITON_INTERPRET=1), which is how its tests run where there is none.

Legend: T packed rows, S sequences, P tiles, N cached positions of one fold, M rows times query heads of a tile, D head
size.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_tlt.models.decoders.torch.paged import PagedPlan

# N, and warps of a program. Products of float32 have no tensor cores: larger tiles or fewer warps spill registers.
_TILE, _TILE_FP32 = (64, 4), (16, 16)
_NO_WINDOW = 1 << 30  # positions: more than a context has

# The decorator is untyped, and its functions take pointers where Python gives tensors. Widths and row counts change
# from step to step, so they are not compiled in. A number that is 1 is a constant to triton all the same (no `.to`).
jit: Any = triton.jit


def attend(
    q: Tensor, keys: Tensor, values: Tensor, plan: PagedPlan, own: Tensor | None = None, window: int = 0
) -> Tensor:
    """q [T, Hq, D], keys and values [slots, Hkv, D], `own` [2, T, Hkv, D] (contiguous) -> [T, Hq, D] of q's type."""
    assert keys.is_contiguous() and values.is_contiguous(), "one layer's cache is contiguous"
    assert own is None or (own.is_contiguous() and plan.low is not None and plan.ends is None)
    q, (rows, heads, d), kv_heads = q.contiguous(), q.shape, keys.shape[1]
    out, splits = torch.empty_like(q), plan.splits
    part = tops = totals = out  # not written where the context is not split
    if splits > 1:
        part = torch.empty(splits, rows, heads, d, dtype=torch.float32, device=q.device)
        tops, totals = torch.empty(2, splits, rows, heads, dtype=torch.float32, device=q.device)
    low = plan.first if plan.low is None else plan.low
    padded = triton.next_power_of_2(d)
    fold, warps = _TILE_FP32 if keys.dtype is torch.float32 else _TILE
    for tiles in plan.tiles:
        _attend[(len(tiles.at), heads // tiles.heads, splits)](
            *(q, keys, values, *((keys, values) if own is None else own)),
            *(out, part, tops, totals, tiles.at, plan.starts, plan.first, low),
            *(plan.first if plan.ends is None else plan.ends, plan.tables, plan.slots),
            *(d**-0.5, rows, plan.tables.shape[1], window or _NO_WINDOW),
            HAS_LOW=plan.low is not None,
            INVARIANT=plan.ends is not None,
            BLOCK=own is not None,
            FOLD=tiles.heads,
            HEADS=heads,
            KV=kv_heads,
            D=d,
            D_PADDED=padded,
            PAGE=plan.block_size,
            M=tiles.folded,
            N=fold,
            SPLITS=splits,
            num_warps=warps,
        )
    if splits > 1:
        _combine[(rows, heads)](part, tops, totals, out, rows, HEADS=heads, D=d, D_PADDED=padded, SPLITS=splits)
    return out


@jit
def _fold(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    query,
    keys,
    values,
    slot,
    is_key,
    seen,
    scale,
    top,
    total,
    mixed,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    KV: tl.constexpr,
):
    """N more keys into the running maximum [M], sum [M] and mix [M, D]; `slot` counts rows of [Hkv, D]."""
    at = tl.arange(0, D_PADDED)
    offsets = slot[:, None] * (KV * D) + at[None, :]
    mask = is_key[:, None] & (at < D)[None, :]
    k = tl.load(keys + offsets, mask=mask, other=0.0)
    scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(seen, scores, -1.0e30)
    higher = tl.maximum(top, tl.max(scores, 1))
    weights = tl.where(seen, tl.exp(scores - higher[:, None]), 0.0)
    keep = tl.exp(top - higher)
    v = tl.load(values + offsets, mask=mask, other=0.0)
    mixed = mixed * keep[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return higher, total * keep + tl.sum(weights, 1), mixed


@jit(do_not_specialize=["num_rows", "table_width", "window"])  # one program for all batches, also for rows of 1
def _attend(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    q, keys, values, own_keys, own_values, out, part, tops, totals, tiles, starts, firsts, lows, ends, tables, slots,
    scale, num_rows, table_width, window, HAS_LOW: tl.constexpr, INVARIANT: tl.constexpr, BLOCK: tl.constexpr,
    FOLD: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    PAGE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One tile of FOLD query heads of one kv head, one split."""
    tile, split = tl.program_id(0), tl.program_id(2)
    first_head = tl.program_id(1) * FOLD
    EACH: tl.constexpr = M // FOLD
    sequence, row0 = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    start, end_row = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    count, first = end_row - start, tl.load(firsts + sequence)
    low = tl.load(lows + sequence) if HAS_LOW else 0
    m, at, n = tl.arange(0, M), tl.arange(0, D_PADDED), tl.arange(0, N)
    row = row0 + m // FOLD
    is_row = (m // FOLD < EACH) & (row < count)
    where = (start + row).to(tl.int64) * HEADS + first_head + m % FOLD  # [M], rows of [T, Hq]
    mask = is_row[:, None] & (at < D)[None, :]
    query = tl.load(q + where[:, None] * D + at[None, :], mask=mask, other=0.0)
    head = first_head // (HEADS // KV)
    k, v = keys + head * D, values + head * D
    own_k, own_v = own_keys + head * D if BLOCK else k, own_values + head * D if BLOCK else v
    top = tl.full((M,), -1.0e30, tl.float32)
    total = tl.zeros((M,), tl.float32)
    mixed = tl.zeros((M, D_PADDED), tl.float32)

    if INVARIANT:  # every SPLITS-th N positions, the rows' own among them
        begin, step = split * N, SPLITS * N
        end = tl.minimum(tl.load(ends + sequence), first + row0 + EACH)
    else:
        low = tl.maximum(low, first + row0 - window + 1) if BLOCK else low  # the tile's first row sees most
        base = low if BLOCK else 0
        each = (tl.cdiv(first - base, SPLITS) + N - 1) // N * N
        begin, end, step = base + split * each, tl.minimum(base + split * each + each, first), N
    for p0 in range(begin, end, step):
        p = p0 + n
        is_key = (p < end) & (p >= low)
        block = tl.load(tables + sequence * table_width + p // PAGE, mask=is_key, other=0)
        slot = block.to(tl.int64) * PAGE + p % PAGE
        seen = is_key[None, :] & is_row[:, None]
        if INVARIANT:
            seen = seen & (p[None, :] <= first + row[:, None])
        if BLOCK:
            seen = seen & (p[None, :] > first + row[:, None] - window)
        top, total, mixed = _fold(query, k, v, slot, is_key, seen, scale, top, total, mixed, D, D_PADDED, KV)
    if not INVARIANT:  # noqa: SIM102 - a condition of the compiler around one of the device
        if split == SPLITS - 1:  # keys of the rows themselves: none sees a later row, but a block's
            for j0 in range(0, count if BLOCK else tl.minimum(count, row0 + EACH), N):
                j = j0 + n
                is_key = j < count
                slot = tl.load(slots + start + j, mask=is_key, other=0).to(tl.int64)
                seen = is_key[None, :] & is_row[:, None] & (j[None, :] <= (count if BLOCK else row[:, None]))
                if HAS_LOW and not BLOCK:
                    seen = seen & (((first + j) >= low)[None, :] | (j[None, :] == row[:, None]))
                top, total, mixed = _fold(
                    query, own_k, own_v, slot, is_key, seen, scale, top, total, mixed, D, D_PADDED, KV
                )

    if SPLITS == 1:
        found = mixed / tl.where(is_row, total, 1.0)[:, None]
        tl.store(out + where[:, None] * D + at[None, :], found.to(out.dtype.element_ty), mask=mask)
    else:
        here = split.to(tl.int64) * num_rows * HEADS + where
        tl.store(part + here[:, None] * D + at[None, :], mixed, mask=mask)
        tl.store(tops + here, top, mask=is_row)
        tl.store(totals + here, total, mask=is_row)


@jit(do_not_specialize=["num_rows"])
def _combine(  # type: ignore[no-untyped-def]
    part,
    tops,
    totals,
    out,
    num_rows,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """All splits of one row and head, weighed by their maxima."""
    row, head = tl.program_id(0), tl.program_id(1)
    split, at = tl.arange(0, SPLITS), tl.arange(0, D_PADDED)
    here = (split.to(tl.int64) * num_rows + row) * HEADS + head
    top, total = tl.load(tops + here), tl.load(totals + here)
    weight = tl.exp(top - tl.max(top, 0))
    mixed = tl.load(part + here[:, None] * D + at[None, :], mask=(at < D)[None, :], other=0.0)
    found = tl.sum(mixed * weight[:, None], 0) / tl.sum(total * weight, 0)
    place = (row.to(tl.int64) * HEADS + head) * D
    tl.store(out + place + at, found.to(out.dtype.element_ty), mask=at < D)
