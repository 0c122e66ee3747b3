"""Sequences to packed micro-batches, and flat results back to sequences.

Legend: L tokens of a sequence, R response tokens of it, T rows of a micro-batch (with padding), N its
response rows.

A sequence feeds its first L - 1 tokens: the last one predicts nothing. Response token i is predicted by the
row of token prompt_len - 1 + i. Only those N rows go through the LM head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.actor.attention import PackedRows
from megatron_tlt.data.packing import pack_by_budget
from megatron_tlt.types import TrainSequence


@dataclass(frozen=True)
class MicroBatch:
    """One packed row of sequences; `members` are their indices in the list it was packed from."""

    input_ids: Tensor  # [1, T] int64
    positions: Tensor  # [1, T] int64, from 0 in each sequence
    packing: PackedRows
    rows: Tensor  # [N] int64, rows that predict response tokens
    labels: Tensor  # [N] int64, those tokens
    segments: Tensor  # [N] int64, position in `members`
    members: tuple[int, ...]
    sequences: tuple[TrainSequence, ...] = field(repr=False)

    @property
    def is_filler(self) -> bool:
        """Whether this stands in for no work at all (an empty data-parallel rank)."""
        return not self.members

    def response_array(self, name: str) -> Tensor:
        """A response-aligned attribute of the sequences, flat [N] fp32 on the micro-batch's device."""
        flat = np.concatenate([np.asarray(getattr(s, name), dtype=np.float32) for s in self.sequences])
        return torch.from_numpy(flat).to(self.labels.device)

    def weights(self) -> Tensor:
        """Every sequence's `weight` on each of its response rows, [N] fp32."""
        per_sequence = torch.tensor(
            [s.weight for s in self.sequences], dtype=torch.float32, device=self.labels.device
        )
        return per_sequence[self.segments]


def response_len(sequence: TrainSequence) -> int:
    """R."""
    return sequence.length - sequence.prompt_len


def pack(
    sequences: Sequence[TrainSequence], budget: int, multiple: int, device: torch.device, packed_format: str
) -> list[MicroBatch]:
    """Packs sequences that have a response into micro-batches of at most `budget` tokens.

    A longer one goes alone. Rows are padded to `multiple`; `packed_format` is megatron's qkv_format. Raises
    ValueError for a response without a prompt.
    """
    useful = [i for i, s in enumerate(sequences) if response_len(s) > 0]
    for i in useful:
        if sequences[i].prompt_len < 1:
            raise ValueError(f"sequence {i} has no prompt token to predict its first response token from")
    groups = pack_by_budget([sequences[i].length for i in useful], budget)
    # Longest first: sequences of one length become neighbours, which attention takes as one batch.
    ordered = [sorted((useful[j] for j in group), key=lambda i: -sequences[i].length) for group in groups]
    return [_assemble(tuple(members), sequences, multiple, device, packed_format) for members in ordered]


def filler(multiple: int, device: torch.device, packed_format: str) -> MicroBatch:
    """The smallest micro-batch, for a rank without a sequence: it still joins the collectives of the step."""
    zero = np.zeros(1, np.float32)
    empty = TrainSequence(0, 0, np.zeros(2, np.int64), 1, zero, zero, zero)
    return replace(_assemble((0,), [empty], multiple, device, packed_format), members=())


def _assemble(
    members: tuple[int, ...],
    sequences: Sequence[TrainSequence],
    multiple: int,
    device: torch.device,
    packed_format: str,
) -> MicroBatch:
    chosen = tuple(sequences[i] for i in members)
    fed = [s.length - 1 for s in chosen]
    padding = -sum(fed) % multiple
    sizes = [*fed, padding] if padding else fed
    starts = np.concatenate([[0], np.cumsum(sizes)])
    tokens = [np.asarray(s.token_ids[:-1], dtype=np.int64) for s in chosen] + [np.zeros(padding, np.int64)]
    rows = [starts[k] + np.arange(s.prompt_len - 1, s.length - 1) for k, s in enumerate(chosen)]
    labels = [np.asarray(s.token_ids[s.prompt_len :], dtype=np.int64) for s in chosen]
    segments = np.repeat(np.arange(len(chosen)), [response_len(s) for s in chosen])

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    bounds = tensor(starts.astype(np.int32))
    longest = int(max(sizes))
    return MicroBatch(
        input_ids=tensor(np.concatenate(tokens))[None],
        positions=tensor(np.concatenate([np.arange(size) for size in sizes]))[None],
        packing=PackedRows(
            qkv_format=packed_format,
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            runs=tuple((len(list(same)), length) for length, same in groupby(sizes)),
        ),
        rows=tensor(np.concatenate(rows).astype(np.int64)),
        labels=tensor(np.concatenate(labels)),
        segments=tensor(segments.astype(np.int64)),
        members=members,
        sequences=chosen,
    )


def scatter(flat: Sequence[np.ndarray], batches: Sequence[MicroBatch], count: int) -> list[np.ndarray]:
    """Flat [N] results of packed micro-batches as one [R] array per sequence (empty where R is 0)."""
    out = [np.zeros(0, np.float32)] * count
    for values, batch in zip(flat, batches, strict=True):
        sizes = [response_len(s) for s in batch.sequences]
        for index, part in zip(batch.members, np.split(values, np.cumsum(sizes)[:-1]), strict=True):
            out[index] = np.ascontiguousarray(part, dtype=np.float32)
    return out
