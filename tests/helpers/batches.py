"""Ragged batches of a few rows a sequence, behind cached positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_tlt.models.decoders.base import KVCache
from megatron_tlt.models.decoders.inputs import DecoderInput


def rows_input(
    rows: Sequence[Sequence[int]],
    firsts: Sequence[int],
    tables: Sequence[Sequence[int]],
    block_size: int = 16,
    device: torch.device | str = "cpu",
) -> DecoderInput:
    """Sequence s feeds the tokens `rows[s]` at positions `firsts[s]`, ... of its block table; logits of every row."""
    tokens: list[int] = []
    positions, slots, starts, contexts = [], [], [0], []
    for ids, first, table in zip(rows, firsts, tables, strict=True):
        at = range(first, first + len(ids))
        positions += at
        slots += [table[p // block_size] * block_size + p % block_size for p in at]
        tokens += ids
        starts.append(len(tokens))
        contexts.append(first + len(ids))
    width = max(map(len, tables))
    padded = [list(t) + [0] * (width - len(t)) for t in tables]
    data = (tokens, positions, slots, starts, contexts, padded, list(range(len(tokens))))
    return DecoderInput.of([torch.tensor(x, dtype=torch.int32, device=device) for x in data])


def copy_of(kv: KVCache) -> KVCache:
    """The same cache in other memory."""
    return KVCache(kv.num_blocks, kv.block_size, kv.data.clone())
