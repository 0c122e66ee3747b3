"""How the rows of a packed batch attend in training: its layout, and attention to two sets of keys.

Legend: T packed tokens of B sequences, N bases, D head size, K longest sequence, Q most bases of one, Hq/Hkv query and
kv heads, G = Hq / Hkv, j steps of a draft.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.drafters.model import DraftBatch

_MAX_SCORES = 1 << 25  # attention scores (float32) that are there at a time, of a block of queries


class PairLayout:
    """Index tensors of a `DraftBatch`: attention is computed on padded sequences, everything else on packed rows.

    All of it is computed on the host: no value comes back from the device.
    """

    def __init__(self, batch: DraftBatch):
        starts, first = np.array(batch.starts), np.array(batch.first)
        lengths = np.diff(starts)
        counts = np.maximum(0, lengths - 1 - first)
        query, key = np.arange(counts.max()), np.arange(lengths.max())
        real = query < counts[:, None]  # [B, Q]
        order = np.maximum(0, real.ravel().cumsum() - 1)
        runs = [np.arange(a, a + n) for a, n in zip(batch.offsets, lengths, strict=True)]
        self.base_rows = ((starts[:-1] + first)[:, None] + query)[real]  # [N], `bases` on the host
        # For every token the first one behind it that was not drawn or begins a sequence: drafts end before it.
        ends = np.append(np.where(batch.drawn, starts[-1], np.arange(starts[-1])), starts[-1])
        ends[starts] = starts
        ends = np.minimum.accumulate(ends[::-1])[::-1]
        self._last = ends[self.base_rows + 1] - 2
        self.longest = int(max(a + n for a, n in zip(batch.offsets, lengths, strict=True)))
        self.latest = int(first.max())  # base of the first query, of any sequence
        self._device = batch.tokens.device
        here = self.here
        self.positions = here(np.concatenate(runs))  # [T]
        self.visible = here(first[:, None] + query)  # [B, Q], last place that the query attends to
        self.bases = here(self.base_rows)  # [N], rows of the T
        self.last = here(self._last)  # [N], last row of the base's draft; before the base if its token was given
        self.packed = here(np.flatnonzero(real))  # [N], padded -> packed
        self.padded = here(order.reshape(real.shape))  # [B, Q], packed -> padded; padding repeats a real row
        self.keys = here(np.minimum(starts[:-1, None] + key, starts[-1] - 1))  # [B, K], rows of the T

    def rows(self, step: int) -> Tensor:
        """Rows [N] of the T that step `step` reads at each base; beyond the draft's end its last row."""
        return torch.minimum(self.bases + step, self.last)

    def valid(self, step: int) -> Tensor:
        """Bool [N]: bases that have step `step`."""
        return self.bases + step <= self.last

    def existing(self, step: int) -> np.ndarray:
        """The same as indices of the N, on the host."""
        return np.flatnonzero(self.base_rows + step <= self._last)

    def here(self, values: np.ndarray) -> Tensor:
        """Numbers int64 on the batch's device."""
        return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(self._device, non_blocking=True)


def take(packed: Tensor, index: Tensor) -> Tensor:
    """packed [N, ...] at index [B, Q] -> [B, Q, ...]; the gradient is an `index_add`, cheap on every device."""
    return packed.index_select(0, index.flatten()).view(*index.shape, *packed.shape[1:])


def attend_pairs(
    q: Tensor, keys: Tensor, values: Tensor, chain: list[tuple[Tensor, Tensor]], layout: PairLayout
) -> Tensor:
    """q [N, Hq, D] over its sequence's pairs (keys, values [B, Hkv, K, D]) and its own chain -> [N, Hq, D]."""
    n, heads, d = q.shape
    b, kv, group, wide = *keys.shape[:2], heads // keys.shape[1], layout.padded.shape[1]
    q = q * d**-0.5
    query = take(q, layout.padded).view(b, wide, kv, group, d).permute(0, 2, 3, 1, 4)
    prefix = query, keys, values, layout.visible, layout.latest
    out, norm = PrefixAttention.apply(*prefix)  # type: ignore[no-untyped-call]
    flat = out.permute(0, 3, 1, 2, 4).reshape(b * wide, kv, group, d)
    far = flat.index_select(0, layout.packed)  # [N, kv, G, D]
    if not chain:
        return far.reshape(n, heads, d)
    weight = norm.permute(0, 3, 1, 2).reshape(b * wide, kv, group)
    own_keys, own_values = (torch.stack(t, dim=2) for t in zip(*chain, strict=True))  # [N, kv, j, D]
    own = (q.view(n, kv, group, d) @ own_keys.transpose(2, 3)).float()  # [N, kv, G, j]
    scores = torch.cat([weight.index_select(0, layout.packed).unsqueeze(-1), own], dim=-1)
    shares = scores.softmax(-1).to(q.dtype)
    return (shares[..., :1] * far + shares[..., 1:] @ own_values).view(n, heads, d)


class PrefixAttention(torch.autograd.Function):
    """Attention to a sequence's beginning that also gives its log normaliser n, so that it can be merged with attention
    to other keys.

    Scores S live for a block of queries at a time and are computed again on the way back, as in FlashAttention
    (2205.14135, section 3): the saved tensors grow with T, not with T^2. With P = exp(S - n) and upstream gradients dO
    and dn: dS = P (dO V^T - rowsum(dO O) + dn).
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        visible: Tensor,
        latest: int,
        reach: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """q [B, kv, G, Q, D] scaled, keys and values [B, kv, K, D]; query i of sequence b attends to places 1 ..
        visible[b, i], of [B, Q], which are at most `latest` + i; of these only to the last reach[g], of [G], 1 or more
        -> out like q, n float32 [B, kv, G, Q].
        """
        out, norm = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
        for block, seen in _blocks(q, keys, latest):
            scores = _scores(q[..., block, :], keys[:, :, seen], visible[:, block], reach)
            top = scores.amax(-1, keepdim=True)
            total = scores.sub_(top).exp_().sum(-1, keepdim=True)
            attended = _by_head(scores.to(values.dtype), values[:, :, seen])
            out[..., block, :] = attended / total.to(values.dtype)
            norm[..., block] = (top + total.log()).squeeze(-1)
        ctx.save_for_backward(q, keys, values, visible, out, norm, reach)
        ctx.latest = latest
        return out, norm

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, d_out: Tensor, d_norm: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        """Gradients of q, keys and values."""
        q, keys, values, visible, out, norm, reach = ctx.saved_tensors
        shift = (d_out * out).sum(-1).float() - d_norm
        d_q = torch.empty_like(q)
        d_keys, d_values = (torch.zeros_like(t, dtype=torch.float32) for t in (keys, values))
        for block, seen in _blocks(q, keys, ctx.latest):
            query, upstream = q[..., block, :], d_out[..., block, :]
            p = _scores(query, keys[:, :, seen], visible[:, block], reach)
            p.sub_(norm[..., block].unsqueeze(-1)).exp_()
            d_values[:, :, seen] += _by_key(p.to(values.dtype), upstream)
            d_scores = _by_head(upstream, values[:, :, seen].transpose(2, 3)).float()
            d_scores = d_scores.sub_(shift[..., block].unsqueeze(-1)).mul_(p).to(q.dtype)
            d_q[..., block, :] = _by_head(d_scores, keys[:, :, seen])
            d_keys[:, :, seen] += _by_key(d_scores, query)
        return d_q, d_keys.to(keys.dtype), d_values.to(values.dtype), None, None, None


def _blocks(q: Tensor, keys: Tensor, latest: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries of [B, kv, G, Q, D], with the places that any of them attends to."""
    b, kv, group, queries, _ = q.shape
    places = keys.shape[2]
    size = max(1, _MAX_SCORES // (b * kv * group * places))
    for begin in range(0, queries, size):
        end = min(begin + size, queries)
        yield slice(begin, end), slice(0, min(places, latest + end))


def _scores(q: Tensor, keys: Tensor, place: Tensor, reach: Tensor | None) -> Tensor:
    """Scores float32 [B, kv, G, q, K]; -inf where a query does not attend. Its last place is `place` [B, q]; it attends
    to the last `reach` [G] places or to all.
    """
    scores = _by_head(q, keys.transpose(2, 3)).float()
    key = torch.arange(keys.shape[2], device=q.device)
    unseen = (key > place[..., None]) | (key < 1)  # padding behind a sequence attends to anything
    scores.masked_fill_(unseen[:, None, None], float("-inf"))
    if reach is not None:
        behind = key <= place[:, None, :, None] - reach[:, None, None]  # [B, G, q, K]
        scores.masked_fill_(behind[:, None], float("-inf"))
    return scores


def _by_head(rows: Tensor, matrix: Tensor) -> Tensor:
    """rows [B, kv, G, q, X] times matrix [B, kv, X, Y], one product a kv head: [B, kv, G, q, Y]."""
    return (rows.flatten(2, 3) @ matrix).unflatten(2, rows.shape[2:4])


def _by_key(left: Tensor, right: Tensor) -> Tensor:
    """Sum over queries of left [B, kv, G, q, K] by right [B, kv, G, q, D]: [B, kv, K, D]."""
    return left.flatten(2, 3).transpose(2, 3) @ right.flatten(2, 3)
