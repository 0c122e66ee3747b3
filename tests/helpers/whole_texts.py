"""Hidden states of whole texts, for drafters of kind eagle3: those of named layers, which the engine does not keep.

Legend: L tokens of a text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from megatron_tlt.models.inputs import DecoderInput

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_tlt.models.base import Decoder


def read_hidden_states(
    decoder: Decoder, texts: Iterable[Sequence[int]], block_size: int, max_tokens: int
) -> Iterator[Tensor]:
    """`DecoderOutput.hidden` of each text, [L, ..] on the CPU, in the decoder's type.

    Texts share forwards of at most `max_tokens` rows; a longer one has a forward of its own.
    """
    group: list[Sequence[int]] = []
    for text in texts:
        if group and sum(map(len, group)) + len(text) > max_tokens:
            yield from _hidden_of_group(decoder, group, block_size)
            group = []
        group.append(text)
    if group:
        yield from _hidden_of_group(decoder, group, block_size)


def _hidden_of_group(decoder: Decoder, texts: Sequence[Sequence[int]], size: int) -> Iterator[Tensor]:
    counts = [len(t) for t in texts]
    blocks = [-(-n // size) for n in counts]
    first = [sum(blocks[:i]) for i in range(len(blocks))]
    width = max(blocks)
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    lists = (
        [t for text in texts for t in text],
        [p for n in counts for p in range(n)],
        [b * size + p for b, n in zip(first, counts, strict=True) for p in range(n)],
        starts,
        counts,
        [[*range(b, b + n), *[0] * (width - n)] for b, n in zip(first, blocks, strict=True)],
        [starts[1] - 1],  # one row's logits: the least that every decoder computes
    )
    tensors = [torch.tensor(x, dtype=torch.int32, device=decoder.device) for x in lists]
    batch = replace(DecoderInput.of(tensors), all_hidden=True)
    hidden = decoder.forward(batch, decoder.new_kv_cache(sum(blocks), size)).hidden
    assert hidden is not None, "asked for"
    yield from hidden.cpu().split(counts)
