"""Paged attention in PyTorch: gathers keys and values by block table, then `scaled_dot_product_attention`.

Legend: T packed rows, S sequences, C longest context, Hq/Hkv query and kv heads, D head size.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_tlt.models.inputs import DecoderInput


class AttentionPlan:
    """How one batch is cut into dense calls; made once a forward, used by every layer.

    Sequences with one row (decoding) share one padded call; each longer one (a prefill chunk) has its own.
    """

    def __init__(self, batch: DecoderInput, block_size: int):
        starts, contexts = batch.query_start.tolist(), batch.context_lens.tolist()
        counts = [b - a for a, b in pairwise(starts)]
        device = batch.positions.device
        groups = [[s for s, n in enumerate(counts) if n == 1]] + [[s] for s, n in enumerate(counts) if n > 1]
        self.calls: list[tuple[Tensor, int, Tensor, Tensor]] = []
        for group in filter(None, groups):
            longest = max(contexts[s] for s in group)
            rows = torch.tensor([r for s in group for r in range(starts[s], starts[s + 1])], device=device)
            at = torch.arange(longest, device=device)
            blocks = batch.block_tables[torch.tensor(group, device=device)].long()
            slots = blocks[:, at // block_size] * block_size + at % block_size  # [S, C]
            seen = batch.positions[rows].view(len(group), -1, 1)  # [S, Q, 1]
            self.calls.append((rows, len(group), slots, (at <= seen)[:, None]))


def paged_attention(q: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan) -> Tensor:
    """q [T, Hq, D], keys and values [slots, Hkv, D] (one layer's cache, flat) -> [T, Hq, D]."""
    out = torch.empty_like(q)
    for rows, sequences, slots, mask in plan.calls:
        query = q[rows].view(sequences, -1, *q.shape[1:]).transpose(1, 2)
        flat = slots.reshape(-1)
        k = keys.index_select(0, flat).view(*slots.shape, *keys.shape[1:]).transpose(1, 2)
        v = values.index_select(0, flat).view(*slots.shape, *values.shape[1:]).transpose(1, 2)
        attended = scaled_dot_product_attention(query, k, v, attn_mask=mask, enable_gqa=True)
        out[rows] = attended.transpose(1, 2).reshape(-1, *q.shape[1:])
    return out
