"""Sequences to packed micro-batches, and flat results back to sequences.

Legend: L tokens of a sequence, R response tokens of it, T rows of a micro-batch (with padding), N its
response rows, cp context parallel size.

A sequence feeds its first L - 1 tokens: the last one predicts nothing. Response token i is predicted by the
row of token P - 1 + i, with P prompt tokens. Only those N rows go through the LM head.

Under context parallelism every sequence is padded to a multiple of 2 cp rows, and a rank has T / cp of the rows
(`context_parallel.py`). Sequences, labels and segments stay whole, for the loss reads whole responses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_tlt.actor.attention import PackedRows
from megatron_tlt.actor.context_parallel import rows_of_rank
from megatron_tlt.actor.routing import Routing
from megatron_tlt.config.planning.activations import ROW_MULTIPLE
from megatron_tlt.data.packing import pack_by_budget
from megatron_tlt.types import TrainSequence, Trajectory


def row_multiple(dtype: torch.dtype, device: torch.device) -> int:
    """What the rows of products in `dtype` are padded to a multiple of.

    oneDNN, which multiplies bf16 on CPUs, compiles a kernel for each number of rows and keeps it, in pieces all over
    the heap: with a new number in each micro-batch a rank's memory would grow with every step.
    """
    return ROW_MULTIPLE if device.type == "cpu" and dtype is torch.bfloat16 else 1


class RowLayout(NamedTuple):
    """How the ranks of a replica divide a micro-batch's rows, and where its tensors go."""

    device: torch.device
    packed_format: str  # megatron's qkv_format
    tp: int = 1
    cp: int = 1
    cp_rank: int = 0
    row_multiple: int = 1  # of a rank's rows, and of those of its LM head: see `row_multiple`

    @property
    def sequence_multiple(self) -> int:
        """Rows of a sequence are a multiple of this."""
        return 1 if self.cp == 1 else 2 * self.cp

    def padded(self, rows: int) -> int:
        """`rows` of a sequence with its padding."""
        return -(-rows // self.sequence_multiple) * self.sequence_multiple


@dataclass(frozen=True)
class MicroBatch:
    """One packed row of sequences; `members` are their indices in the list it was packed from."""

    input_ids: Tensor  # [1, T / cp] int64
    positions: Tensor  # [1, T / cp] int64, from 0 in each sequence
    packing: PackedRows
    rows: Tensor  # int64, the N of this rank that predict response tokens, then zeros up to a `row_multiple`
    labels: Tensor  # [N] int64, those tokens
    segments: Tensor  # [N] int64, position in `members`
    members: tuple[int, ...]
    sequences: tuple[TrainSequence, ...] = field(repr=False)
    own: Tensor | None = None  # [N of this rank] int64: which of the N response rows are here; None: all
    here: Tensor | None = None  # [T / cp] int64: which of the T rows are here; None: all
    routing: Routing | None = None  # of a mixture of experts (`with_routing`)

    @property
    def is_filler(self) -> bool:
        """Whether this holds no sequence: the micro-batch of a rank without work."""
        return not self.members

    def response_array(self, name: str) -> Tensor:
        """A response-aligned attribute of the sequences, flat [N] fp32 on the micro-batch's device."""
        return self._flat([getattr(s, name) for s in self.sequences])

    def rollout_logprobs(self) -> Tensor:
        """The engine's log-probs of the response tokens, flat [N] fp32."""
        return self._flat([s.trajectory.logprobs for s in self.sequences])

    def _flat(self, arrays: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays).astype(np.float32, copy=False)).to(self.labels.device)

    def rows_here(self, array: np.ndarray) -> Tensor:
        """This rank's rows of values [T, ...] of all rows, on the micro-batch's device."""
        host = torch.from_numpy(array)
        if self.labels.is_cuda:  # pinned: the copy waits for no kernel
            host = host.pin_memory()
        whole = host.to(self.labels.device, non_blocking=True)
        return whole if self.here is None else whole[self.here]

    def weights(self) -> Tensor:
        """Every sequence's `weight` on each of its response rows, [N] fp32."""
        per_sequence = torch.tensor([s.weight for s in self.sequences], dtype=torch.float32, device=self.labels.device)
        return per_sequence[self.segments]


def response_len(sequence: TrainSequence) -> int:
    """R."""
    return len(sequence.trajectory.logprobs)


def pack_micro_batches(sequences: Sequence[TrainSequence], budget: int, layout: RowLayout) -> list[MicroBatch]:
    """Packs sequences that have a response into micro-batches of at most `budget` tokens, over all ranks of a replica.

    A longer one goes alone. Raises ValueError for a response without a prompt.
    """
    useful = [i for i, s in enumerate(sequences) if response_len(s) > 0]
    for i in useful:
        if sequences[i].trajectory.response_start < 1:
            raise ValueError(f"sequence {i} has no prompt token to predict its first response token from")
    groups = pack_by_budget([layout.padded(sequences[i].trajectory.length) for i in useful], budget)
    # Longest first: sequences of one length become neighbours, which attention takes as one batch.
    ordered = [sorted((useful[j] for j in group), key=lambda i: -sequences[i].trajectory.length) for group in groups]
    return [_assemble(tuple(members), sequences, layout) for members in ordered]


def filler(layout: RowLayout) -> MicroBatch:
    """The smallest micro-batch, for a rank without a sequence: it still joins the collectives of the step."""
    empty = Trajectory(0, 0, token_ids=np.zeros(2, np.int32), logprobs=np.zeros(1, np.float32))
    return replace(_assemble((0,), [TrainSequence.of(empty)], layout), members=())


def _assemble(members: tuple[int, ...], sequences: Sequence[TrainSequence], layout: RowLayout) -> MicroBatch:
    chosen = tuple(sequences[i] for i in members)
    trajectories = [s.trajectory for s in chosen]
    sizes = [layout.padded(t.length - 1) for t in trajectories]
    # Sequence parallelism divides the rows of a rank, whose products want a multiple.
    if padding := -sum(sizes) % math.lcm(layout.sequence_multiple * layout.tp, layout.row_multiple * layout.cp):
        sizes = [*sizes, padding]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    tokens = np.zeros(starts[-1], np.int64)
    for start, trajectory in zip(starts, trajectories, strict=False):
        tokens[start : start + trajectory.length - 1] = trajectory.token_ids[:-1]
    rows = [starts[k] + np.arange(t.response_start - 1, t.length - 1) for k, t in enumerate(trajectories)]
    labels = [t.token_ids[t.response_start :].astype(np.int64) for t in trajectories]
    segments = np.repeat(np.arange(len(chosen)), [response_len(s) for s in chosen])

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(layout.device)

    bounds = tensor(starts.astype(np.int32))
    # Transformer Engine needs these under context parallelism; the same tensor means that there are no gaps.
    padded = bounds if layout.cp > 1 else None
    longest = int(max(sizes))
    whole = MicroBatch(
        input_ids=tensor(tokens)[None],
        positions=tensor(np.concatenate([np.arange(size) for size in sizes]))[None],
        packing=PackedRows(
            qkv_format=layout.packed_format,
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
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
    mine = whole if layout.cp == 1 else _of_rank(whole, sizes, layout)
    return replace(mine, rows=F.pad(mine.rows, (0, -len(mine.rows) % layout.row_multiple)))


def _of_rank(whole: MicroBatch, sizes: list[int], layout: RowLayout) -> MicroBatch:
    """This context parallel rank's rows of a micro-batch."""

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(layout.device)

    by_rank = np.concatenate([rows_of_rank(sizes, layout.cp, rank) for rank in range(layout.cp)])
    place = np.argsort(by_rank)
    count = len(by_rank) // layout.cp
    here = tensor(by_rank[layout.cp_rank * count :][:count])
    rows = tensor(place)[whole.rows] - layout.cp_rank * count
    own = ((rows >= 0) & (rows < count)).nonzero().flatten()
    packing = replace(whole.packing, to_whole=tensor(place))
    input_ids, positions = whole.input_ids[:, here], whole.positions[:, here]
    return replace(whole, input_ids=input_ids, positions=positions, packing=packing, rows=rows[own], own=own, here=here)


def num_tokens(batch: MicroBatch) -> int:
    """Rows that are tokens of a sequence: neither padding nor a filler's."""
    return sum(s.trajectory.length - 1 for s in batch.sequences) if batch.members else 0


def with_routing(batch: MicroBatch, replays: bool = False, loss_weight: float = 0.0) -> MicroBatch:
    """The micro-batch of a mixture of experts. `replays`, `loss_weight`: see `Routing`."""
    *starts, rows = batch.packing.starts
    is_token = np.zeros(rows, bool)
    for start, sequence in zip(starts, batch.sequences if batch.members else (), strict=False):
        is_token[start : start + sequence.trajectory.length - 1] = True
    return replace(batch, routing=Routing(batch.rows_here(is_token), replays, loss_weight))


def recorded_routed_experts(batch: MicroBatch) -> Tensor | None:
    """The experts that were recorded for this rank's rows, [T / cp, L, k] int16, -1: unknown; None: for no row.

    L layers with experts, k chosen: hundreds of bytes a token, so they come to the device with their forward.
    """
    by_sequence = [s.trajectory.routed_experts for s in batch.sequences]
    recorded = [experts for experts in by_sequence if experts is not None]
    if not recorded:
        return None
    *starts, rows = batch.packing.starts
    ids = np.full((rows, *recorded[0].shape[1:]), -1, np.int16)
    for start, experts in zip(starts, by_sequence, strict=False):
        if experts is not None:
            ids[start : start + len(experts)] = experts
    return batch.rows_here(ids)


def scatter(flat: Sequence[np.ndarray], batches: Sequence[MicroBatch], count: int) -> list[np.ndarray]:
    """Flat [N] results of packed micro-batches as one [R] array per sequence (empty where R is 0)."""
    out = [np.zeros(0, np.float32)] * count
    for values, batch in zip(flat, batches, strict=True):
        sizes = [response_len(s) for s in batch.sequences]
        for index, part in zip(batch.members, np.split(values, np.cumsum(sizes)[:-1]), strict=True):
            out[index] = np.ascontiguousarray(part, dtype=np.float32)
    return out
