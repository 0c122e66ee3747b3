"""What the drafter trains on and how its rows attend: packed sequences, their layout, attention to two sets of keys.

Legend: T packed tokens of B sequences, N bases, D head size, K longest sequence, Q most bases of one, Hq/Hkv query and
kv heads, G = Hq / Hkv, j steps of a draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class PairBatch:
    """B sequences of L_b tokens, packed, and where drafts begin in them. Places count from a sequence's first token.

    A *base* is a place s at which a draft may begin: s = first[b] .. L_b - 2, where token s + 1 is part of the
    answer. The row of unrolled step j at base s is at place s + j; it exists while s + j <= L_b - 2.
    """

    tokens: Tensor  # [T] int64
    hidden: Tensor  # [T, H], the policy's hidden state after its final norm at the same positions
    starts: list[int]  # [B + 1]
    first: list[int]  # [B], first base of each sequence, >= 1
    offsets: list[int]  # [B], position of each sequence's first token: > 0 for windows of long sequences


class PairLayout:
    """Index tensors of a `PairBatch`: attention is computed on padded sequences, everything else on packed rows."""

    def __init__(self, batch: PairBatch):
        device = batch.tokens.device
        lengths = [b - a for a, b in pairwise(batch.starts)]
        counts = [max(0, n - 1 - f) for n, f in zip(lengths, batch.first, strict=True)]
        k, q = max(lengths), max(counts)
        start = torch.tensor(batch.starts[:-1], device=device)
        length, first, count = (torch.tensor(x, device=device) for x in (lengths, batch.first, counts))
        runs = zip(batch.offsets, lengths, strict=True)
        self.positions = torch.cat([torch.arange(a, a + n, device=device) for a, n in runs])  # [T]
        self.longest = max(a + n for a, n in zip(batch.offsets, lengths, strict=True))
        query = torch.arange(q, device=device)
        real = query < count[:, None]  # [B, Q]
        place = first[:, None] + query  # [B, Q], of each base
        self.bases = (start[:, None] + place)[real]  # [N], rows of the T
        self.last = (start + length - 2)[:, None].expand(-1, q)[
            real
        ]  # [N], last row with something to predict
        self.packed = torch.arange(real.numel(), device=device).view(real.shape)[
            real
        ]  # [N], padded -> packed
        order = real.flatten().cumsum(0).sub(1).clamp(min=0)
        self.padded = order.view(real.shape)  # [B, Q], packed -> padded; padding repeats a real row
        key = torch.arange(k, device=device)
        self.keys = (start[:, None] + key).clamp(max=len(self.positions) - 1)  # [B, K], rows of the T
        seen = (key >= 1) & (key <= place[..., None]) & (key < length[:, None, None])  # [B, Q, K]
        self.bias = torch.zeros(seen.shape, device=device).masked_fill_(~seen, float("-inf"))
        self.bias[..., 1] = torch.where(real, self.bias[..., 1], 0.0)  # a padding row sees something: no NaN

    def rows(self, step: int) -> Tensor:
        """Rows [N] of the T that step `step` reads at each base; beyond a sequence's end its last row."""
        return torch.minimum(self.bases + step, self.last)

    def valid(self, step: int) -> Tensor:
        """Bool [N]: bases that have step `step`."""
        return self.bases + step <= self.last


def take(packed: Tensor, index: Tensor) -> Tensor:
    """packed [N, ...] at index [B, Q] -> [B, Q, ...]; the gradient is an `index_add`, cheap on every device."""
    return packed.index_select(0, index.flatten()).view(*index.shape, *packed.shape[1:])


def attend(
    q: Tensor, keys: Tensor, values: Tensor, chain: list[tuple[Tensor, Tensor]], layout: PairLayout
) -> Tensor:
    """q [N, Hq, D] over its sequence's pairs (keys, values [B, Hkv, K, D]) and its own chain -> [N, Hq, D]."""
    n, heads, d = q.shape
    b, kv, group, wide = *keys.shape[:2], heads // keys.shape[1], layout.padded.shape[1]
    q = q * d**-0.5
    query = take(q, layout.padded).view(b, wide, kv, group, d)
    folded = query.permute(0, 2, 3, 1, 4).reshape(b, kv, group * wide, d)
    out, norm = PrefixAttention.apply(folded, keys, values, layout.bias)
    flat = out.view(b, kv, group, wide, d).permute(0, 3, 1, 2, 4).reshape(b * wide, kv, group, d)
    far = flat.index_select(0, layout.packed)  # [N, kv, G, D]
    if not chain:
        return far.reshape(n, heads, d)
    weight = norm.view(b, kv, group, wide).permute(0, 3, 1, 2).reshape(b * wide, kv, group)
    own_keys, own_values = (torch.stack(t, dim=2) for t in zip(*chain, strict=True))  # [N, kv, j, D]
    own = (q.view(n, kv, group, d) @ own_keys.transpose(2, 3)).float()  # [N, kv, G, j]
    scores = torch.cat([weight.index_select(0, layout.packed).unsqueeze(-1), own], dim=-1)
    shares = scores.softmax(-1).to(q.dtype)
    return (shares[..., :1] * far + shares[..., 1:] @ own_values).view(n, heads, d)


class PrefixAttention(torch.autograd.Function):
    """Attention that also gives its log normaliser, so that it can be merged with attention to other keys.

    With P = softmax(S) and upstream gradients dO and dn: dS = P (dO V^T - rowsum(dO O) + dn). Saves P only, and works
    in place: most of a training step's memory traffic is here.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """q [B, kv, G Q, D] scaled, keys and values [B, kv, K, D], bias [B, Q, K] (0 or -inf, no row all -inf) ->
        out [B, kv, G Q, D], log normaliser float32 [B, kv, G Q].
        """
        scores = (q @ keys.transpose(2, 3)).float()
        scores.unflatten(2, (-1, bias.shape[1])).add_(bias[:, None, None])
        top = scores.amax(-1, keepdim=True)
        total = scores.sub_(top).exp_().sum(-1, keepdim=True)
        out = (scores.to(values.dtype) @ values) / total.to(values.dtype)
        ctx.save_for_backward(q, keys, values, out, scores, total)
        return out, (top + total.log()).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_norm: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        """Gradients of q, keys and values."""
        q, keys, values, out, scores, total = ctx.saved_tensors
        shift = ((d_out * out).sum(-1).float() - d_norm).unsqueeze(-1) / total
        d_out = d_out / total.to(d_out.dtype)
        d_values = scores.to(d_out.dtype).transpose(2, 3) @ d_out
        d_scores = (d_out @ values.transpose(2, 3)).float().sub_(shift).mul_(scores).to(q.dtype)
        return d_scores @ keys, d_scores.transpose(2, 3) @ q, d_values, None
