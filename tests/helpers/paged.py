"""Paged attention from a `PagedPlan`, row by row in plain PyTorch: what the kernel must compute, without its tricks."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_tlt.models.decoders.torch.paged import PagedPlan


def attend_rows(q: Tensor, keys: Tensor, values: Tensor, plan: PagedPlan) -> Tensor:
    """See `paged.PagedRun`. Every tile and split is visited, so a row that no tile has, or two have, shows."""
    out = torch.full_like(q, float("nan"))
    group = q.shape[1] // keys.shape[1]
    starts, firsts = plan.starts.tolist(), plan.first.tolist()
    tiles = [(*place, t.rows) for t in plan.tiles for place in t.at.tolist()]
    for sequence, row0, most in tiles:
        start, count = starts[sequence], starts[sequence + 1] - starts[sequence]
        for row in range(row0, min(count, row0 + most)):
            assert out[start + row].isnan().all(), "a row of two tiles"
            slots = _slots(plan, sequence, row, start, count, firsts[sequence])
            k = keys[slots].repeat_interleave(group, 1).double()
            v = values[slots].repeat_interleave(group, 1).double()
            scores = torch.einsum("hd,khd->hk", q[start + row].double(), k) * q.shape[-1] ** -0.5
            out[start + row] = torch.einsum("hk,khd->hd", scores.softmax(-1), v).to(q.dtype)
    return out


def _slots(plan: PagedPlan, sequence: int, row: int, start: int, count: int, first: int) -> list[int]:
    """Slots of the keys that one row sees."""
    low = 0 if plan.low is None else int(plan.low[sequence])
    table, size = plan.tables[sequence].tolist(), plan.block_size
    found = [table[p // size] * size + p % size for p in range(low, first)]
    for j in range(min(count, row + 1)):
        if first + j >= low or j == row:
            found.append(int(plan.slots[start + j]))
    return found
