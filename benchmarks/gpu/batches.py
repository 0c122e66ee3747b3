"""Batches as the engine makes them: equally many rows of each sequence behind cached positions."""

from __future__ import annotations

import torch

from megatron_tlt.models.decoders.inputs import DecoderInput

BLOCK = 16


def blocks_for(sequences: int, tokens: int, context: int) -> int:
    """Blocks that `chains` of the same arguments name."""
    return sequences * -(-(context + tokens) // BLOCK)


def chains(sequences: int, tokens: int, context: int, vocab: int, device: torch.device | str = "cpu") -> DecoderInput:
    """`tokens` rows of each sequence behind `context` cached positions, in shuffled blocks of their own."""
    each = -(-(context + tokens) // BLOCK)
    order = torch.randperm(sequences * each, generator=torch.Generator().manual_seed(0))
    tables = order.view(sequences, each)
    at, owner = torch.arange(tokens).repeat(sequences), torch.arange(sequences).repeat_interleave(tokens)
    places = context + at
    slots = tables[owner, places // BLOCK] * BLOCK + places % BLOCK
    rows = torch.arange(sequences * tokens + 1)
    ids = (rows[:-1] * 7919) % vocab
    parts = [ids, places, slots, rows[::tokens], torch.full((sequences,), context + tokens)]
    parts += [tables, rows[:-1]]
    return DecoderInput.of([p.to(device, torch.int32).contiguous() for p in parts])
