"""The Triton kernels of a layer's experts; `route` and `mix_experts` in `decoders.torch.layers` are their reference.

    _scores     rows times router
    _choose     a row's k best experts and their gates
    _group      for every expert the pairs (row * k + place) that chose it, in order
    _gate_up    an expert's rows, gathered, times its gate and up rows; silu(gate) * up, to the pair's place
    _down       the same rows times its down projection
    _sum        a row's k outputs times its gates (and without gates the parts of a product, `products.py`)

A program of a product belongs to one expert and walks over its rows, however many there are: the host reads none of
these numbers, so a graph may hold the launches. Sums are float32 and in one order; no program adds to another's output.

Legend: T rows, H hidden size, E experts, k chosen by a row, F width of an expert, N = T k pairs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# By the mean number of rows of an expert, above which a tile is used: rows, columns, bytes of a step of the summed
# dimension, warps. Few rows: many programs read the weights once. More: each reading serves more rows.
_TILES = ((48, (128, 64, 128, 8)), (32, (64, 64, 128, 4)), (-1, (16, 32, 256, 4)))
_SCORED = 16  # rows and experts a program of `_scores`: the smallest tile of the tensor cores
_SCORED_STEP = 256  # bytes of its summed dimension
_SCANNED = 1024  # pairs that `_group` reads at a time
_SUMMED = 1024  # values of a row a program of `_sum`

jit: Any = triton.jit  # the decorator is untyped


def route(h: Tensor, router: Tensor, k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    assert h.is_contiguous() and router.is_contiguous()
    (rows, hidden), experts = h.shape, router.shape[0]
    scores, gates = (torch.empty(rows, n, dtype=torch.float32, device=h.device) for n in (experts, k))
    ids = torch.empty(rows, k, dtype=torch.int32, device=h.device)
    grid = triton.cdiv(rows, _SCORED), triton.cdiv(experts, _SCORED)
    step = _SCORED_STEP // h.element_size()
    _scores[grid](h, router, scores, rows, experts, H=hidden, TILE=_SCORED, STEP=step)
    sizes = {"E": experts, "EXPERTS": triton.next_power_of_2(experts), "K": k}
    _choose[(rows,)](scores, gates, ids, RENORMALISE=renormalise, **sizes)
    return gates, ids


def mix_experts(
    h: Tensor, gates: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, is_invariant: bool = False
) -> Tensor:
    """With `is_invariant`, uses the tile for few rows whatever their number."""
    assert all(t.is_contiguous() for t in (h, gates, ids, gate_up, down))
    (rows, k), (experts, hidden, width) = ids.shape, down.shape
    listed = torch.empty(experts, rows, dtype=torch.int32, device=h.device)
    counts = torch.empty(experts, dtype=torch.int32, device=h.device)
    inner, done = h.new_empty(rows * k, width), h.new_empty(rows, k, hidden)
    tiles = _TILES[-1:] if is_invariant else _TILES
    many, columns, step, warps = next(tile for least, tile in tiles if rows * k > least * experts)
    tile = {"H": hidden, "F": width, "K": k, "ROWS": many, "COLUMNS": columns, "STEP": step // h.element_size()}
    tile["num_warps"] = warps
    _group[(experts,)](ids, listed, counts, rows * k, rows, SCANNED=_SCANNED)
    _gate_up[(experts, triton.cdiv(width, columns))](h, gate_up, listed, counts, inner, rows, **tile)
    _down[(experts, triton.cdiv(hidden, columns))](inner, down, listed, counts, done, rows, **tile)
    return sum_parts(done, gates, torch.empty_like(h))


def sum_parts(parts: Tensor, gates: Tensor | None, out: Tensor) -> Tensor:
    """Sums over K of parts [T, K, H], times gates float32 [T, K] if there are some, in order; written to out [T, H]."""
    rows, k, hidden = parts.shape
    block = min(_SUMMED, triton.next_power_of_2(hidden))
    sizes = {"HAS_GATES": gates is not None, "H": hidden, "K": k, "N": block}
    _sum[(rows, triton.cdiv(hidden, block))](parts, parts if gates is None else gates, out, **sizes)
    return out


@jit(do_not_specialize=["rows"])
def _scores(h, router, scores, rows, experts, H: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """TILE rows times TILE experts. Products of bf16 are exact in float32: the scores are those of float32 inputs."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    expert, at = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, STEP)
    total = tl.zeros([TILE, TILE], tl.float32)
    for start in range(0, H, STEP):
        k = start + at
        x = tl.load(h + row[:, None] * H + k[None, :], mask=(row < rows)[:, None] & (k < H)[None, :], other=0.0)
        there = (k < H)[:, None] & (expert < experts)[None, :]
        part = tl.load(router + expert[None, :] * H + k[:, None], mask=there, other=0.0)
        total = tl.dot(x, part, total, input_precision="ieee")
    kept = (row < rows)[:, None] & (expert < experts)[None, :]
    tl.store(scores + row[:, None] * experts + expert[None, :], total, mask=kept)


@jit
def _choose(  # type: ignore[no-untyped-def]
    scores, gates, ids, RENORMALISE: tl.constexpr, E: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr
):
    """One row. A softmax over the chosen experts is that over all, divided by its sum over the chosen ones."""
    row, expert = tl.program_id(0).to(tl.int64), tl.arange(0, EXPERTS)
    score = tl.load(scores + row * E + expert, mask=expert < E, other=float("-inf"))
    gate = tl.exp(score - tl.max(score, 0))
    gate = tl.where(expert < E, gate / tl.sum(gate, 0), -1.0)
    total, left = 0.0, gate
    for _ in tl.static_range(K if RENORMALISE else 0):
        total += tl.max(left, 0)
        left = tl.where(expert == tl.argmax(left, 0), -1.0, left)
    for place in tl.static_range(K):
        best, value = tl.argmax(gate, 0), tl.max(gate, 0)
        tl.store(ids + row * K + place, best)
        tl.store(gates + row * K + place, value / total if RENORMALISE else value)
        gate = tl.where(expert == best, -1.0, gate)


@jit
def _group(ids, listed, counts, pairs, rows, SCANNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """One expert: the pairs that chose it, ascending, and their number. A row chooses it once at most."""
    expert, at = tl.program_id(0), tl.arange(0, SCANNED)
    found = 0
    for first in range(0, pairs, SCANNED):
        pair = first + at
        is_mine = tl.load(ids + pair, mask=pair < pairs, other=-1) == expert
        mine = is_mine.to(tl.int32)
        place = found + tl.cumsum(mine, 0) - mine
        tl.store(listed + expert.to(tl.int64) * rows + place, pair, mask=is_mine)
        found += tl.sum(mine, 0)
    tl.store(counts + expert, found)


@jit(do_not_specialize=["rows"])
def _gate_up(  # type: ignore[no-untyped-def]
    h, weight, listed, counts, inner, rows, H: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """COLUMNS of one expert's width, for all of its rows."""
    expert, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    count, at = tl.load(counts + expert), tl.arange(0, STEP)
    mine = weight + expert * 2 * F * H
    for first in range(0, count, ROWS):
        place = first + tl.arange(0, ROWS)
        pair = tl.load(listed + expert * rows + place, mask=place < count, other=0).to(tl.int64)
        gate, up = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, H, STEP):
            k = start + at
            seen = (place < count)[:, None] & (k < H)[None, :]
            x = tl.load(h + (pair // K)[:, None] * H + k[None, :], mask=seen, other=0.0)
            there = (k < H)[:, None] & (column < F)[None, :]
            part = mine + column[None, :] * H + k[:, None]
            gate = tl.dot(x, tl.load(part, mask=there, other=0.0), gate, input_precision="ieee")
            up = tl.dot(x, tl.load(part + F * H, mask=there, other=0.0), up, input_precision="ieee")
        both = gate / (1.0 + tl.exp(-gate)) * up
        kept = (place < count)[:, None] & (column < F)[None, :]
        tl.store(inner + pair[:, None] * F + column[None, :], both.to(inner.dtype.element_ty), mask=kept)


@jit(do_not_specialize=["rows"])
def _down(  # type: ignore[no-untyped-def]
    inner, weight, listed, counts, done, rows, H: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """COLUMNS of the hidden size, for all rows of one expert."""
    expert, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    count, at = tl.load(counts + expert), tl.arange(0, STEP)
    mine = weight + expert * H * F
    for first in range(0, count, ROWS):
        place = first + tl.arange(0, ROWS)
        pair = tl.load(listed + expert * rows + place, mask=place < count, other=0).to(tl.int64)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, F, STEP):
            k = start + at
            seen = (place < count)[:, None] & (k < F)[None, :]
            x = tl.load(inner + pair[:, None] * F + k[None, :], mask=seen, other=0.0)
            there = (k < F)[:, None] & (column < H)[None, :]
            part = tl.load(mine + column[None, :] * F + k[:, None], mask=there, other=0.0)
            total = tl.dot(x, part, total, input_precision="ieee")
        kept = (place < count)[:, None] & (column < H)[None, :]
        tl.store(done + pair[:, None] * H + column[None, :], total.to(done.dtype.element_ty), mask=kept)


@jit
def _sum(  # type: ignore[no-untyped-def]
    parts, gates, out, HAS_GATES: tl.constexpr, H: tl.constexpr, K: tl.constexpr, N: tl.constexpr
):
    """N values of one row."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * N + tl.arange(0, N)
    total = tl.zeros([N], tl.float32)
    for place in tl.static_range(K):
        pair = row * K + place
        value = tl.load(parts + pair * H + at, mask=at < H, other=0.0).to(tl.float32)
        total += value * tl.load(gates + pair) if HAS_GATES else value
    tl.store(out + row * H + at, total.to(out.dtype.element_ty), mask=at < H)
