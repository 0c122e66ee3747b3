"""Batches as the engine makes them: chains and draft trees of equally many rows behind cached positions."""

from __future__ import annotations

import torch

from megatron_tlt.models.inputs import DecoderInput

BLOCK = 16


def blocks_for(sequences: int, tokens: int, context: int) -> int:
    """Blocks that `chains` of the same arguments name."""
    return sequences * -(-(context + tokens) // BLOCK)


def chains(
    sequences: int,
    tokens: int,
    context: int,
    vocab: int,
    device: torch.device | str = "cpu",
    tree: bool = False,
) -> DecoderInput:
    """`tokens` rows of each sequence behind `context` cached positions, in shuffled blocks of their own.

    With `tree`, rows 1, 2 are children of row 0, rows 3, 4 of row 1, and so on.
    """
    each = -(-(context + tokens) // BLOCK)
    order = torch.randperm(sequences * each, generator=torch.Generator().manual_seed(0))
    tables = order.view(sequences, each)
    at, owner = torch.arange(tokens).repeat(sequences), torch.arange(sequences).repeat_interleave(tokens)
    places = context + at
    slots = tables[owner, places // BLOCK] * BLOCK + places % BLOCK
    depth = (at + 1).float().log2().long() if tree else at
    rows = torch.arange(sequences * tokens + 1)
    ids = (rows[:-1] * 7919) % vocab
    parts = [ids, context + depth, slots, rows[::tokens], torch.full((sequences,), context + tokens)]
    parts += [tables, rows[:-1]]
    if tree:
        parts.append(torch.where(at > 0, owner * tokens + (at - 1) // 2, -1))
    return DecoderInput.of([p.to(device, torch.int32).contiguous() for p in parts])
