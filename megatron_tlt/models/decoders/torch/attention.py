"""Paged attention in PyTorch: gathers keys and values by block table, then `scaled_dot_product_attention`.

Keys of a row are the cached positions before its sequence's first row, by block table, and the sequence's rows of the
batch up to itself, by their slots. Of a block drafter's rows (`BlockPlan`) the latter are of tensors of their own.

Legend: T packed rows, S sequences, Q rows of one sequence, C longest context, K keys gathered for a sequence,
Hq/Hkv query and kv heads, D head size, M blocks of a static table.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_tlt.models.decoders.inputs import DecoderInput

_SHARED_ROWS = 64  # sequences with at most so many rows share a padded call with others of equal length
_GATHERED_BYTES = 1 << 26  # of keys and values that `BlockPlan` gathers at a time, of so many blocks as fit, or one


class AttentionPlan(Protocol):
    """Attention of the rows of one batch; made once a forward, used by every layer."""

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q [T, Hq, D], keys and values [slots, Hkv, D] (one layer's cache, flat) -> [T, Hq, D]."""


class RaggedPlan:
    """A ragged batch as static ones.

    Sequences with equally few rows (decoding, verification) share one; each longer one (a prefill chunk) has its own.
    """

    def __init__(self, batch: DecoderInput, block_size: int):
        starts, contexts = batch.query_start.tolist(), batch.context_lens.tolist()
        counts = [b - a for a, b in pairwise(starts)]
        groups: dict[int, list[int]] = defaultdict(list)
        for s, n in enumerate(counts):
            groups[n if n <= _SHARED_ROWS else -s - 1].append(s)
        groups.pop(0, None)
        self._parts: list[tuple[Tensor, StaticPlan]] = []  # rows of the batch, and their attention
        device = batch.positions.device
        for group in groups.values():
            each = counts[group[0]]
            at = torch.tensor(group, device=device)
            first = torch.tensor([starts[s] for s in group], device=device)
            rows = (first[:, None] + torch.arange(each, device=device)).flatten()
            blocks = -(-(max(contexts[s] for s in group) - each) // block_size)
            part = replace(
                batch,
                positions=batch.positions[rows],
                slot_mapping=batch.slot_mapping[rows],
                context_lens=batch.context_lens[at],
                block_tables=batch.block_tables[at, :blocks],
            )
            self._parts.append((rows, StaticPlan(part, block_size, each)))

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        out = torch.empty_like(q)
        for rows, plan in self._parts:
            out[rows] = plan.attend(q[rows], keys, values)
        return out


class StaticPlan:
    """The same for a batch of one shape: S sequences of Q rows each over tables of M blocks, M * block_size long.

    Everything is computed on the device from the batch's tensors, without a value coming to the host, so that a
    CUDA graph of it can be replayed on other values. The longest context may be M * block_size + Q.
    """

    def __init__(self, batch: DecoderInput, block_size: int, rows_each: int, first_visible: Tensor | None = None):
        """`first_visible` [S]: no row sees a cached position before it."""
        sequences = batch.context_lens.shape[0]
        assert batch.positions.shape[0] == sequences * rows_each, "a static batch is full"
        first = batch.positions.view(sequences, rows_each)[:, 0]
        length = batch.block_tables.shape[1] * block_size
        among = torch.ones(rows_each, rows_each, dtype=torch.bool, device=first.device).tril()[None]
        own = batch.slot_mapping.view(sequences, rows_each).long()
        self._slots = torch.cat([table_slots(batch.block_tables, length, block_size), own], 1)
        at = torch.arange(length, device=first.device)
        before = at < first[:, None, None]
        if first_visible is not None:
            before = before & (at >= first_visible[:, None, None])
        shape = (sequences, rows_each, -1)
        self._mask = torch.cat([before.expand(shape), among.expand(shape)], -1)[:, None]  # [S, 1, Q, keys]

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        query = q.view(len(self._slots), -1, *q.shape[1:]).transpose(1, 2)
        k, v = gather_heads(keys, self._slots), gather_heads(values, self._slots)
        k, v = heads_for(query, k, v, is_masked=True)
        attended = scaled_dot_product_attention(query, k, v, attn_mask=self._mask, enable_gqa=True)
        return attended.transpose(1, 2).reshape(q.shape)


class BlockPlan:
    """Attention of S blocks of Q rows, static as well: a row sees all rows of its block, and cached positions."""

    def __init__(self, positions: Tensor, first_visible: Tensor, tables: Tensor, block_size: int):
        """Of rows at `positions` [S, Q]: cached are those before a block's first row. `first_visible` [S], `tables`
        [S, M].
        """
        self._slots = table_slots(tables, tables.shape[1] * block_size, block_size)
        self._positions, self._at = positions[..., None], torch.arange(self._slots.shape[1], device=tables.device)
        self._before = (self._at < self._positions[:, :1]) & (self._at >= first_visible[:, None, None])  # [S, 1, C]

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, own: Tensor, window: int = 0) -> Tensor:
        """q [T, Hq, D] over keys and values [slots, Hkv, D] and the blocks' `own` [2, T, Hkv, D] -> [T, Hq, D]. With a
        `window`, of cached positions those above a row's own minus `window`.
        """
        before, shape = self._before, self._positions.shape[:2]
        if window:
            before = before & (self._at > self._positions - window)
        mask = torch.cat([before, before.new_ones(*before.shape[:2], shape[1])], 2)[:, None]
        parts = (t.unflatten(0, shape).transpose(1, 2) for t in (q, own[0], own[1]))  # [S, heads, Q, D]
        each = 4 * len(self._at) * keys[0].numel() * keys.element_size()  # gathered, then joined
        split, done = max(1, _GATHERED_BYTES // max(1, each)), []
        for query, k, v, at, seen in zip(*(t.split(split) for t in (*parts, self._slots, mask)), strict=True):
            near = torch.cat([gather_heads(keys, at), k], 2), torch.cat([gather_heads(values, at), v], 2)
            near = heads_for(query, *near, is_masked=True)
            done.append(scaled_dot_product_attention(query, *near, attn_mask=seen, enable_gqa=True))
        return torch.cat(done).transpose(1, 2).reshape(q.shape)


def table_slots(tables: Tensor, length: int, block_size: int) -> Tensor:
    """Slots of positions 0 .. length-1 by block tables [S, blocks] -> [S, length] int64."""
    at = torch.arange(length, device=tables.device)
    return tables.long()[:, at // block_size] * block_size + at % block_size


def gather_heads(cache: Tensor, slots: Tensor) -> Tensor:
    """Rows `slots` [S, K] of one layer's cache [slots, Hkv, D] -> [S, Hkv, K, D]."""
    return cache.index_select(0, slots.reshape(-1)).view(*slots.shape, *cache.shape[1:]).transpose(1, 2)


def heads_for(query: Tensor, key: Tensor, value: Tensor, is_masked: bool = False) -> tuple[Tensor, Tensor]:
    """Keys and values [S, Hkv, K, D] as `scaled_dot_product_attention` takes them beside `query` [S, Hq, Q, D]: as they
    are, or on CUDA repeated for each query head, [S, Hq, K, D].

    Of PyTorch's fused kernels on CUDA only flash attention takes grouped heads (2.13), in half precision and without a
    mask; the others refuse, and all scores [S, Hq, Q, K] would be made at once.
    """
    group = query.shape[1] // key.shape[1]
    if group == 1 or not query.is_cuda or (query.dtype.itemsize == 2 and not is_masked):
        return key, value
    return key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
