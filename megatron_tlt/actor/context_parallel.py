"""Context parallelism of the local layers: which rows a rank holds, attention over all of them, whole responses.

Legend: T rows of a micro-batch over all cp ranks, cp context parallel size, r this rank in its group, n query heads,
g key/value heads (of this TP rank), d width of a head, c rows of one chunk, N response rows of the micro-batch.

Every sequence has a multiple of 2 cp rows and is cut into 2 cp chunks; rank r holds chunks r and 2 cp - 1 - r, so that
causal attention costs the same everywhere (the layout that Transformer Engine takes, too):

    cp 2, rows of a sequence   | 0 1 | 2 3 | 4 5 | 6 7 |      rank 0: 0 1 6 7      rank 1: 2 3 4 5

Everything but core attention works on rows alone. Padding lies behind a sequence's last token, where causal attention
keeps it from every real row. Keys and values of all rows are gathered, and each of a rank's two chunks attends to the
rows up to its own last one. Transformer Engine's layers have a form of their own (`ActorSection.cp_comm`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from megatron_tlt.actor.attention import PackedRows, SDPACoreAttention
from megatron_tlt.models.decoders.torch.attention import heads_for

# isort: split
# megatron comes after compat.
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region


def rows_of_rank(sizes: list[int], cp: int, rank: int) -> np.ndarray:
    """The rows of packed sequences that a rank holds, in its order, int64 [T / cp]. `sizes` are multiples of 2 cp."""
    parts, start = [], 0
    for size in sizes:
        c = size // (2 * cp)
        parts += [np.arange(start + i * c, start + (i + 1) * c) for i in (rank, 2 * cp - 1 - rank)]
        start += size
    return np.concatenate(parts)


class GatheredKeysAttention(SDPACoreAttention):
    """Attention of a rank's rows to the keys of all. The gradients of keys and values return by a reduce-scatter."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, packing: PackedRows) -> Tensor:
        """query [T / cp, 1, n, d], key and value [T / cp, 1, g, d], rotated -> [T / cp, 1, n * d]."""
        assert packing.to_whole is not None
        cp = self.cp.size()
        here = torch.cat([key, value], -1).squeeze(1)
        there = gather_from_sequence_parallel_region(here, group=self.cp).index_select(0, packing.to_whole)
        sizes = [count * length for count, length in packing.runs]
        queries = query.squeeze(1).split([size // cp for size in sizes])
        runs = zip(packing.runs, queries, there.split(sizes), strict=True)
        outputs = [self._of_run(run, q, kv, packing) for run, q, kv in runs]
        return torch.cat(outputs).unsqueeze(1)

    def _of_run(self, run: tuple[int, int], query: Tensor, keys: Tensor, packing: PackedRows) -> Tensor:
        """`count` sequences of one length: query [count * length / cp, n, d], keys [count * length, g, 2 d]."""
        (count, length), cp, rank = run, self.cp.size(), self.cp.rank()
        c = length // (2 * cp)
        q = query.unflatten(0, (count, 2, c)).transpose(2, 3)  # [count, 2, n, c, d]
        k, v = keys.unflatten(0, run).transpose(1, 2).chunk(2, -1)  # [count, g, length, d]
        outputs = []
        for i, end in enumerate(((rank + 1) * c, (2 * cp - rank) * c)):  # rows up to the chunk's last
            mask = _lower_right(packing, q, c, end)
            keys_of, values_of = heads_for(q[:, i], k[:, :, :end], v[:, :, :end])
            grouped = q.shape[2] != keys_of.shape[1]
            outputs.append(
                F.scaled_dot_product_attention(
                    q[:, i], keys_of, values_of, attn_mask=mask, scale=self.scale, enable_gqa=grouped
                )
            )
        return torch.stack(outputs, 1).transpose(2, 3).flatten(0, 2).flatten(1)


def _lower_right(packing: PackedRows, like: Tensor, rows: int, end: int) -> Any:
    """The mask of the last `rows` of `end` causal rows: flash attention's own on CUDA, a tensor elsewhere.

    Layers share the tensors. Mutates `packing.masks`.
    """
    if like.is_cuda:
        return causal_lower_right(rows, end)
    if (rows, end) not in packing.masks:
        packing.masks[rows, end] = like.new_full((rows, end), float("-inf")).triu_(end - rows + 1)
    return packing.masks[rows, end]


def whole_responses(local: Tensor, own: Tensor, total: int, group: dist.ProcessGroup) -> Tensor:
    """Values [K, N of this rank] of the response rows `own` as [K, N = total] of all, equal on every rank. Collective.

    Differentiable: every rank computes the same loss of whole responses, so the gradient of a rank's own rows is
    complete on that rank, and is taken as it is. Each row's gradient then exists once in the group, and the sum of
    gradients over data and context parallel ranks is the loss's.
    """
    return _WholeResponses.apply(local, own, total, group)  # type: ignore[no-any-return]


class _WholeResponses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, own: Tensor, total: int, group: Any) -> Tensor:
        ctx.save_for_backward(own)
        whole = local.new_zeros(local.shape[0], total)
        whole[:, own] = local
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].index_select(1, ctx.saved_tensors[0]), None, None, None
