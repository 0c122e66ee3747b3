"""Rotary position embedding of packed sequences, and where context parallel ranks have their rows."""

from __future__ import annotations

import torch
from torch import Tensor


def positions(size: int, cp_size: int, cp_rank: int) -> Tensor:
    """Which of the `size` rows of a sequence a rank has, in its order: of 2 cp chunks one from each end."""
    if cp_size == 1:
        return torch.arange(size)
    chunks = torch.arange(size).view(2 * cp_size, -1)
    return torch.cat((chunks[cp_rank], chunks[-1 - cp_rank]))


def apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, *, tensor_format: str, fused: bool, cu_seqlens: Tensor, cp_size: int, cp_rank: int
) -> Tensor:
    """t [T, n, d] rotated by its rows' positions, computed in fp32; freqs [S, 1, 1, d] fp32.

    `cu_seqlens` int32: where the sequences end among the rows of all context parallel ranks.
    """
    assert tensor_format == "thd" and fused
    assert freqs.dtype is torch.float32 and cu_seqlens.dtype is torch.int32
    sizes = cu_seqlens.diff().tolist()
    rows = freqs[torch.cat([positions(size, cp_size, cp_rank) for size in sizes]), 0]  # [T, 1, d]
    x = t.float()
    first, second = x.chunk(2, dim=-1)
    return (x * rows.cos() + torch.cat((-second, first), dim=-1) * rows.sin()).to(t.dtype)
