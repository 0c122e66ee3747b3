"""The Triton kernels of keyed sampling: one program draws a row's token and its log-probability, or finds a drafter's
candidates.

Instead of some 45 kernels over int64 [R, V], a row's logits are walked a few times inside one program: for their
maximum; where a mask is on, for its thresholds; for the noise, the arg max and the sum of exponentials. A row's result
depends on nothing but the row. `rollout.sampler` is the definition, with `rollout.masks`.

Thresholds are found without sorting, by setting the bits of the *order key* of a score (an integer in the scores'
order) from the highest to the lowest. Top-p weighs tokens in fixed point, so a sum does not depend on its order.

Legend: R rows, V vocabulary, N tokens of one block.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_tlt.models.decoders.keys import MIX_A, MIX_B, TOKEN_STEP

_BLOCK = 2048  # N: eight tokens a thread
_WARPS = 8

_A, _B, _STEP = tl.constexpr(MIX_A), tl.constexpr(MIX_B), tl.constexpr(TOKEN_STEP)
_END = tl.constexpr(1 << 32)  # above every order key
# Fixed point: the weight of the most likely token. V times of it fit int64.
_ONE = tl.constexpr(float(1 << 40))

jit: Any = triton.jit  # the decorator is untyped


def draw(
    logits: Tensor,
    keys: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    drop: Tensor,
    min_p: Tensor,
    is_masked: bool,
) -> Tensor:
    """Int32 [2, R]: tokens, and the bits of their log-probabilities in float32.

    `logits` [R, V] of any float type (contiguous); row keys int64 [R], temperature float32 [R] (0: greedy), top_k int32
    [R] (0: off), drop = 1 - top_p float32 [R] (0: off), min_p float32 [R] (0: off). The last three are read only with
    `is_masked`.
    """
    assert logits.is_contiguous()
    rows, vocab = logits.shape
    out = torch.empty(2, rows, dtype=torch.int32, device=logits.device)
    _draw[(rows,)](
        *(logits, keys, temperature, top_k, drop, min_p, out, rows, vocab),
        MASKED=is_masked,
        N=_BLOCK,
        num_warps=_WARPS,
    )
    return out


def best_candidates(
    logits: Tensor, keys: Tensor, temperature: Tensor, count: int, ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Scores float32 [R, count] and tokens int32 [R, count] of the largest logits / T + noise, best first.

    As `models.keyed_noise.best_candidates`; `logits` float32 [R, V] are overwritten.
    """
    assert logits.is_contiguous() and logits.dtype == torch.float32 and (ids is None or ids.is_contiguous())
    rows, vocab = logits.shape
    scores = torch.empty(rows, count, device=logits.device)
    tokens = torch.empty(rows, count, dtype=torch.int32, device=logits.device)
    _best_candidates[(rows,)](
        *(logits, keys, temperature, keys if ids is None else ids, scores, tokens, vocab),
        HAS_IDS=ids is not None,
        BY_ROW=ids is not None and ids.ndim == 2,
        COUNT=count,
        N=_BLOCK,
        num_warps=_WARPS,
    )
    return scores, tokens


@jit
def _scores(line, at, vocab, divisor):  # type: ignore[no-untyped-def]
    """Logits / temperature of tokens `at` [N]; -inf behind the vocabulary. Adding 0 makes -0 the same as 0."""
    loaded = tl.load(line + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    return tl.div_rn(loaded, divisor) + 0.0


@jit
def _order_keys(scores):  # type: ignore[no-untyped-def]
    """Int64 in [0, 2^32) in the order of float32 `scores` (finite or infinite)."""
    bits = scores.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, -1 - bits, bits + (1 << 31))


@jit
def _gumbel(key, at):  # type: ignore[no-untyped-def]
    """Noise float32 [N] of tokens `at` under a row's key, as `models.keyed_noise.gumbel_noise`."""
    z = key + (at + 1).to(tl.uint64) * _STEP
    z = (z ^ (z >> 30)) * _A
    z = (z ^ (z >> 27)) * _B
    m = ((z ^ (z >> 31)) >> 40).to(tl.int32)
    unit = 1.0 / (1 << 24)
    low = tl.log((m.to(tl.float32) + 0.5) * unit)
    # log1p(-v) in terms of log: w = 1 - v is rounded, and the quotient takes the rounding back out
    v = (((1 << 24) - 1 - m).to(tl.float32) + 0.5) * unit
    w = tl.maximum(1.0 - v, 0.5)  # below a half `low` is used
    high = tl.where(w == 1.0, -v, tl.log(w) * tl.div_rn(v, tl.where(w == 1.0, 1.0, 1.0 - w)))
    return -tl.log(-tl.where(m >= (1 << 23), high, low))


@jit
def _between(line, vocab, divisor, top, low, high, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many tokens have an order key in [low, high), and their weight in fixed point."""
    lane = tl.arange(0, N)
    counts, weights = tl.zeros((N,), tl.int32), tl.zeros((N,), tl.int64)
    for v0 in range(0, vocab, N):
        scores = _scores(line, v0 + lane, vocab, divisor)
        keys = _order_keys(scores)
        inside = (keys >= low) & (keys < high) & (v0 + lane < vocab)
        counts += inside.to(tl.int32)
        weights += tl.where(inside, (tl.exp(scores - top) * _ONE).to(tl.int64), 0)
    return tl.sum(counts, 0), tl.sum(weights, 0)


@jit
def _top_k_bound(line, vocab, divisor, top, k, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """The order key of the k-th largest score: the greatest one that at least k tokens reach."""
    bound = tl.zeros((), tl.int64)
    for step in range(32):
        tried = bound + (tl.full((), 1, tl.int64) << (31 - step))
        count, _ = _between(line, vocab, divisor, top, tried, _END, N)
        bound = tl.where(count >= k, tried, bound)
    return bound


@jit
def _top_p_bound(line, vocab, divisor, top, drop, low, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """The smallest order key that top-p keeps of those from `low` on, and how many of its tokens it drops.

    Tokens leave from the least likely up, those of equal scores by their ids, while all that left weigh at most `drop`.
    """
    _, whole = _between(line, vocab, divisor, top, low, _END, N)
    room = (drop.to(tl.float64) * whole.to(tl.float64)).to(tl.int64)
    bound = tl.zeros((), tl.int64)
    for step in range(32):
        tried = bound + (tl.full((), 1, tl.int64) << (31 - step))
        _, below = _between(line, vocab, divisor, top, low, tried, N)
        bound = tl.where(below <= room, tried, bound)
    _, below = _between(line, vocab, divisor, top, low, bound, N)
    count, weight = _between(line, vocab, divisor, top, tl.maximum(low, bound), bound + 1, N)
    return tl.maximum(low, bound), ((room - below) // tl.maximum(weight // tl.maximum(count, 1), 1)).to(tl.int32)


@jit
def _draw(  # type: ignore[no-untyped-def]
    logits, keys, temperatures, top_ks, drops, min_ps, out, num_rows, vocab, MASKED: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """One row."""
    row, lane = tl.program_id(0), tl.arange(0, N)
    key, heat = tl.load(keys + row).to(tl.uint64, bitcast=True), tl.load(temperatures + row)
    is_hot = heat > 0
    divisor = tl.where(is_hot, heat, 1.0)
    line = logits + row.to(tl.int64) * vocab
    tops = tl.full((N,), float("-inf"), tl.float32)
    for v0 in range(0, vocab, N):
        tops = tl.maximum(tops, _scores(line, v0 + lane, vocab, divisor))
    top = tl.max(tops, 0)
    bound, dropped = tl.zeros((), tl.int64), tl.zeros((), tl.int32)
    least = tl.zeros((), tl.float32)
    if MASKED:
        k, drop = tl.load(top_ks + row), tl.load(drops + row)
        least = tl.load(min_ps + row)
        if is_hot & (k > 0) & (k < vocab):
            bound = _top_k_bound(line, vocab, divisor, top, k, N)
        if is_hot & (drop > 0):
            bound, dropped = _top_p_bound(line, vocab, divisor, top, drop, bound, N)

    best, ids = tl.full((N,), float("-inf"), tl.float32), tl.zeros((N,), tl.int32)
    sums, equal = tl.zeros((N,), tl.float32), tl.zeros((), tl.int32)  # `equal`: tokens at the bound so far
    for v0 in range(0, vocab, N):
        at = v0 + lane
        scores = _scores(line, at, vocab, divisor)
        weights = tl.exp(scores - top)
        sums += weights
        if MASKED:
            order = _order_keys(scores)
            at_bound = (order == bound) & (at < vocab)
            rank = equal + tl.cumsum(at_bound.to(tl.int32), 0) - 1
            equal += tl.sum(at_bound.to(tl.int32), 0)
            kept = (order > bound) | (at_bound & (rank >= dropped))
            kept = kept & ((weights >= least) | (scores == top))
            scores = tl.where(kept | (is_hot == 0), scores, float("-inf"))
        drawn = tl.where(is_hot, scores + _gumbel(key, at), scores)
        is_better = drawn > best
        best, ids = tl.where(is_better, drawn, best), tl.where(is_better, at, ids)
    token = tl.min(tl.where(best == tl.max(best, 0), ids, vocab), 0)
    token = tl.minimum(token, vocab - 1)
    chosen = tl.div_rn(tl.load(line + token).to(tl.float32), divisor)
    logprob = chosen - top - tl.log(tl.sum(sums, 0))
    tl.store(out + row, token)
    tl.store(out + num_rows + row, logprob.to(tl.int32, bitcast=True))


@jit
def _best_candidates(  # type: ignore[no-untyped-def]
    logits, keys, temperatures, ids, scores, tokens, vocab, HAS_IDS: tl.constexpr, BY_ROW: tl.constexpr,
    COUNT: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """One row: its scores are computed once and kept in place of the logits, then read once a candidate. `ids` are the
    tokens of the columns, of all rows or of each.
    """
    row, lane = tl.program_id(0), tl.arange(0, N)
    key, heat = tl.load(keys + row).to(tl.uint64, bitcast=True), tl.load(temperatures + row)
    is_hot = heat > 0
    divisor = tl.where(is_hot, heat, 1.0)
    line = logits + row.to(tl.int64) * vocab
    names = ids + row.to(tl.int64) * vocab if BY_ROW else ids
    for v0 in range(0, vocab, N):
        at = v0 + lane
        found = _scores(line, at, vocab, divisor)
        named = tl.load(names + at, mask=at < vocab, other=0) if HAS_IDS else at
        tl.store(line + at, tl.where(is_hot, found + _gumbel(key, named), found), mask=at < vocab)
    tl.debug_barrier()
    last, taken = tl.full((), float("inf"), tl.float32), tl.full((), -1, tl.int32)
    for rank in range(COUNT):
        best, columns = tl.full((N,), float("-inf"), tl.float32), tl.zeros((N,), tl.int32) + vocab
        for v0 in range(0, vocab, N):
            at = v0 + lane
            found = tl.load(line + at, mask=at < vocab, other=float("-inf"))
            is_left = (found < last) | ((found == last) & (at > taken))
            is_better = is_left & (at < vocab) & ((found > best) | (columns == vocab))
            best, columns = tl.where(is_better, found, best), tl.where(is_better, at, columns)
        last = tl.max(best, 0)
        taken = tl.minimum(tl.min(tl.where(best == last, columns, vocab), 0), vocab - 1)
        tl.store(scores + row * COUNT + rank, last)
        tl.store(tokens + row * COUNT + rank, tl.load(names + taken) if HAS_IDS else taken)
