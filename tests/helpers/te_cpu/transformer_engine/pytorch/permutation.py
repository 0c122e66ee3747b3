"""Rows by expert and back, by the routing map. Legend: T tokens, E experts, R rows (one an expert of a token)."""

from __future__ import annotations

import torch
from torch import Tensor


def moe_permute(inp: Tensor, routing_map: Tensor, num_out_tokens: int) -> tuple[Tensor, Tensor]:
    """Rows [R, H] of `inp` [T, H] by expert, and their tokens [R]; routing_map [T, E]. Without host round trips."""
    places = _places(routing_map, num_out_tokens)
    tokens = places % len(inp)
    return inp.index_select(0, tokens), tokens


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As `moe_permute`; second the rows' gates [R] of `probs` [T, E]."""
    rows, tokens = moe_permute(inp, routing_map, num_out_tokens)
    return rows, probs.T.reshape(-1).index_select(0, _places(routing_map, num_out_tokens)), tokens


def _places(routing_map: Tensor, count: int) -> Tensor:
    return routing_map.T.reshape(-1).logical_not().to(torch.int8).argsort(stable=True)[:count]


def moe_unpermute(inp: Tensor, row_id_map: Tensor, merging_probs: None, restore_shape: torch.Size) -> Tensor:
    """Sums the rows of each token: [R, H] -> [T, H]."""
    assert merging_probs is None
    return inp.new_zeros(restore_shape).index_add(0, row_id_map, inp)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """Chunks of `inp` [R, ...] in another order."""
    chunks = inp.split(split_sizes.tolist())
    return torch.cat([chunks[i] for i in sorted_index.tolist()])


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """Also of the gates [R]."""
    rows, gates = (moe_sort_chunks_by_index(x, split_sizes, sorted_index) for x in (inp, probs))
    return rows, gates
