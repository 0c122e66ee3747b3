"""Hidden states of whole texts, for drafters of kind eagle3: those of named layers, which the engine does not keep.

Legend: L tokens of a text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.helpers.batches import rows_input

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_tlt.models.decoders.base import Decoder


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
    tables = [range(sum(blocks[:i]), sum(blocks[: i + 1])) for i in range(len(blocks))]
    batch = rows_input(texts, [0] * len(texts), tables, size, decoder.device)
    one_row = batch.query_start[1:2] - 1  # of logits: the least that every decoder computes
    batch = replace(batch, logit_rows=one_row, all_hidden=True)
    hidden = decoder.forward(batch, decoder.new_kv_cache(sum(blocks), size)).hidden
    assert hidden is not None, "asked for"
    yield from hidden.cpu().split(counts)
