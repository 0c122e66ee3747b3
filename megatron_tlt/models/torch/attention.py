"""Paged attention in PyTorch: gathers keys and values by block table, then `scaled_dot_product_attention`.

Keys of a row are the cached positions before its sequence's first row, by block table, and rows of the batch: those
before it in a chain, its ancestors in a draft tree (whose nodes share positions, so slots name them).

Legend: T packed rows, S sequences, Q rows of one sequence, C longest context, K keys gathered for a sequence,
Hq/Hkv query and kv heads, G = Hq / Hkv, D head size, M blocks of a static table.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_tlt.models.inputs import DecoderInput

_SHARED_ROWS = 64  # sequences with at most so many rows share a padded call with others of equal length


class Plan(Protocol):
    """How the rows of one batch attend; made once a forward, used by every layer."""

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q [T, Hq, D], keys and values [slots, Hkv, D] (one layer's cache, flat) -> [T, Hq, D]."""


class AttentionPlan:
    """Cuts a ragged batch into dense calls.

    Sequences with equally few rows (decoding, verification) share one padded call; each longer one (a prefill chunk)
    has its own.
    """

    def __init__(self, batch: DecoderInput, block_size: int):
        starts, contexts = batch.query_start.tolist(), batch.context_lens.tolist()
        counts = [b - a for a, b in pairwise(starts)]
        groups: dict[int, list[int]] = defaultdict(list)
        for s, n in enumerate(counts):
            groups[n if n <= _SHARED_ROWS else -s - 1].append(s)
        groups.pop(0, None)
        self.calls: list[tuple[Tensor, int, Tensor, Tensor]] = []  # rows, S, slots [S, K], mask [S, 1, Q, K]
        device = batch.positions.device
        for group in groups.values():
            rows = torch.tensor([r for s in group for r in range(starts[s], starts[s + 1])], device=device)
            first = [starts[s] for s in group]
            is_tree = batch.parents is not None and counts[group[0]] > 1
            longest = max(contexts[s] - (counts[s] if is_tree else 0) for s in group)
            tables = batch.block_tables[torch.tensor(group, device=device)]
            positions = batch.positions[rows].view(len(group), -1)
            slots = table_slots(tables, longest, block_size)
            if is_tree:
                assert batch.parents is not None
                parents = batch.parents[rows].view(len(group), -1).long()
                local = parents - torch.tensor(first, device=device)[:, None]
                mask = tree_mask(positions[:, 0], torch.where(parents < 0, -1, local), longest)
                slots = torch.cat([slots, batch.slot_mapping[rows].view(len(group), -1).long()], 1)
            else:
                mask = torch.arange(longest, device=device) <= positions[..., None]
            self.calls.append((rows, len(group), slots, mask[:, None]))

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See `Plan.attend`."""
        out = torch.empty_like(q)
        for rows, sequences, slots, mask in self.calls:
            query = q[rows].view(sequences, -1, *q.shape[1:]).transpose(1, 2)
            k, v = gather_heads(keys, slots), gather_heads(values, slots)
            attended = scaled_dot_product_attention(query, k, v, attn_mask=mask, enable_gqa=True)
            out[rows] = attended.transpose(1, 2).reshape(-1, *q.shape[1:])
        return out


class StaticPlan:
    """The same for a batch of one shape: S sequences of Q rows each over tables of M blocks, M * block_size long.

    Everything is computed on the device from the batch's tensors, without a value coming to the host, so that a
    CUDA graph of it can be replayed on other values. The longest context may be M * block_size + Q. The G query heads
    of a kv head are folded into rows: no key is copied for a head.
    """

    def __init__(
        self,
        batch: DecoderInput,
        block_size: int,
        rows_each: int,
        group: int,
        first_visible: Tensor | None = None,
    ):
        """`first_visible` [S]: no row sees a cached position before it."""
        sequences = batch.context_lens.shape[0]
        assert batch.positions.shape[0] == sequences * rows_each, "a static batch is full"
        self._shape, self._group = (sequences, rows_each), group
        first = batch.positions.view(sequences, rows_each)[:, 0]
        length = batch.block_tables.shape[1] * block_size
        rows = torch.arange(sequences * rows_each, device=first.device).view(sequences, rows_each)
        if batch.parents is None:
            local = torch.arange(-1, rows_each - 1, device=first.device).expand(sequences, -1)
        else:
            parents = batch.parents.view(sequences, rows_each).long()
            local = torch.where(parents < 0, -1, parents - rows[:, :1])
        own = batch.slot_mapping.view(sequences, rows_each).long()
        self._slots = torch.cat([table_slots(batch.block_tables, length, block_size), own], 1)
        mask = tree_mask(first, local, length)
        if first_visible is not None:
            mask[..., :length] &= torch.arange(length, device=first.device) >= first_visible[:, None, None]
        self._mask = mask[:, None].expand(-1, group, -1, -1).reshape(sequences, 1, group * rows_each, -1)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See `Plan.attend`."""
        (sequences, rows), d = self._shape, q.shape[-1]
        kv_heads = keys.shape[-2]
        folded = (sequences, kv_heads, self._group * rows, d)
        query = q.view(sequences, rows, kv_heads, self._group, d).permute(0, 2, 3, 1, 4).reshape(folded)
        k, v = gather_heads(keys, self._slots), gather_heads(values, self._slots)
        attended = scaled_dot_product_attention(query, k, v, attn_mask=self._mask)
        unfolded = attended.view(sequences, kv_heads, self._group, rows, d).permute(0, 3, 1, 2, 4)
        return unfolded.reshape(q.shape)


def table_slots(tables: Tensor, length: int, block_size: int) -> Tensor:
    """Slots of positions 0 .. length-1 by block tables [S, blocks] -> [S, length] int64."""
    at = torch.arange(length, device=tables.device)
    return tables.long()[:, at // block_size] * block_size + at % block_size


def gather_heads(cache: Tensor, slots: Tensor) -> Tensor:
    """Rows `slots` [S, K] of one layer's cache [slots, Hkv, D] -> [S, Hkv, K, D]."""
    return cache.index_select(0, slots.reshape(-1)).view(*slots.shape, *cache.shape[1:]).transpose(1, 2)


def tree_mask(first: Tensor, parents: Tensor, length: int) -> Tensor:
    """What tree rows see of [`length` cached positions ; the Q rows]: bool [S, Q, length + Q].

    `first` [S] is the position of each sequence's first row, `parents` [S, Q] as for `ancestors`.
    """
    before = torch.arange(length, device=first.device) < first[:, None, None]
    return torch.cat([before.expand(-1, parents.shape[1], -1), ancestors(parents)], -1)


def ancestors(parents: Tensor) -> Tensor:
    """[S, Q] int64, the parent's row within the sequence or -1 -> bool [S, Q, Q]: j is i or above it.

    Reachability by repeated squaring: each product doubles the depth that is covered.
    """
    width = parents.shape[1]
    at = torch.arange(width, device=parents.device)
    reach = ((parents[..., None] == at) | (at[:, None] == at)).float()
    for _ in range((width - 1).bit_length()):
        reach = (reach @ reach).clamp_(max=1)
    return reach > 0
