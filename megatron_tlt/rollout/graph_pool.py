"""`GraphPool`: the policy's decoding and verifying forwards in fixed shapes, captured as CUDA graphs on GPUs.

A forward is padded to a bucket of sequences and of rows for each (1: plain decoding; a last token and its draft:
verifying). Strategies that verify equally many tokens share graphs, and contexts of all lengths. All graphs read one
set of input buffers, write one set of output buffers and share one pool of temporary memory, since one runs at a
time. They are captured at the engine's start, as many as the budget has room for (`config/planning/graphs.py`), and
stay: weights and cache keep their addresses, also when the cache's memory is freed between rollouts
(`models/torch/fixed_memory.py`). Ranks of one engine capture the same steps, with their collectives. On CPU the same
static forwards run without a graph.

    host arrays --pad--> pinned buffer --one copy--> device buffers --graph--> output buffers --rows--> fresh tensors

Legend: S sequences, T their rows, B and k their buckets, M blocks of the longest context, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.config.planning.graphs import ROWS_EACH, batch_buckets, captured_shapes, round_up
from megatron_tlt.models.base import KVCache, empty_routed_experts
from megatron_tlt.models.inputs import DecoderInput, DecoderOutput
from megatron_tlt.models.torch.decoder import TorchDecoder
from megatron_tlt.rollout.graph_capture import (
    CudaCapturer,
    EagerCapturer,
    GraphCache,
    StaticStep,
)


class GraphKey(NamedTuple):
    """The shape of one policy forward."""

    batch_size: int  # B, sequences
    tokens: int  # k, rows of each, the last token included


@dataclass(slots=True)
class PoolSizes:
    """Sizes of a pool's buffers. `verify_rows` bounds B * k of verifying forwards; larger ones run without a graph."""

    max_batch: int
    max_context: int
    block_size: int
    verify_rows: int

    @property
    def max_rows(self) -> int:
        """Rows of the output buffers: every batch bucket of plain decoding fits."""
        return max(batch_buckets(self.max_batch)[-1], self.verify_rows)

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest context."""
        return -(-self.max_context // self.block_size)


class GraphPool:
    """Runs pure decoding and verifying steps of one engine. Not thread-safe."""

    def __init__(
        self,
        decoder: TorchDecoder,
        kv: KVCache,
        sizes: PoolSizes,
        budget_bytes: int | None = None,
        capturer: EagerCapturer | None = None,
    ):
        """`kv` has a scratch block behind its last one. `budget_bytes` bounds `graphs.memory_bytes`; None: no limit."""
        self._decoder, self._kv, self._sizes = decoder, kv, sizes
        self._batch_buckets = batch_buckets(sizes.max_batch)
        decoder.reserve_positions(sizes.max_context + ROWS_EACH[-1])
        self._staging = _Staging(sizes.max_rows, self._batch_buckets[-1], sizes.max_blocks, decoder.device)
        dtype, device = decoder.dtype, decoder.device
        self._logits = torch.zeros(sizes.max_rows, decoder.config.vocab_size, dtype=dtype, device=device)
        self._hidden = torch.zeros(sizes.max_rows, decoder.state_size, dtype=dtype, device=device)
        self._routed_experts = empty_routed_experts(sizes.max_rows, decoder.config, decoder.device)
        if capturer is None:
            is_cuda = decoder.device.type == "cuda"
            capturer = CudaCapturer(decoder.device) if is_cuda else EagerCapturer()
        fixed = sum(t.nbytes for t in (self._staging, self._logits, self._hidden, self._routed_experts))
        self.graphs = GraphCache(capturer, budget_bytes, fixed, decoder.tp)

    def capture(
        self,
        rows_each: int,
        others: Iterable[tuple[Hashable, StaticStep]] = (),
        shapes: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Captures `others` (a drafter's steps) and forwards of up to `rows_each` rows a sequence, as far as the budget
        goes; with `shapes` these (B, k). Before the first request: writes to the cache's scratch block. Mutates.
        """
        if shapes is None:
            shapes = captured_shapes(self._batch_buckets[-1], self._sizes.max_rows, rows_each)
        first, *keys = [GraphKey(*shape) for shape in shapes]
        self._capture(first)
        for key, step in others:
            self.graphs.capture(key, step)
        for key in keys:
            self._capture(key)

    def _capture(self, key: GraphKey) -> None:
        inputs = self._staging.blank(key, self._kv.num_blocks, self._sizes.block_size)
        self.graphs.capture(key, self._step(key, inputs))

    def _step(self, key: GraphKey, inputs: DecoderInput) -> StaticStep:
        return lambda: self._decoder.forward_static(inputs, self._kv, key.tokens, self._outputs(key))

    def _outputs(self, key: GraphKey) -> DecoderOutput:
        rows = key.batch_size * key.tokens
        # With experts always: all steps share graphs.
        routed_experts = self._routed_experts[:rows] if self._routed_experts.numel() else None
        return DecoderOutput(self._logits[:rows], self._hidden[:rows], routed_experts=routed_experts)

    def run(self, batch: DecoderInput) -> DecoderOutput:
        """Logits come in the compute type, and all in fresh tensors. See `Decoder.forward`.

        `batch` is in CPU memory: S sequences of one or more rows each, that have a `key`. The host
        memory that it is copied to is written again by the next call: by then this call's results must have come to the
        host.
        """
        counts = np.diff(batch.query_start.numpy())
        key = self.key(len(counts), int(counts.max()))
        assert key is not None, "more rows than the buffers hold"
        inputs, place, wanted = self._staging.fill(batch, key, self._kv.num_blocks, self._sizes.block_size)
        self.graphs.run(key, self._step(key, inputs))
        rows = key.batch_size * key.tokens
        out = DecoderOutput(self._logits[:rows].index_select(0, wanted))
        if batch.all_hidden:
            out.hidden = self._hidden[:rows].index_select(0, place)
        if batch.all_routed_experts:
            out.routed_experts = self._routed_experts[:rows].index_select(0, place)
        return out

    def key(self, sequences: int, tokens_per_seq: int) -> GraphKey | None:
        """The bucket of a batch of at most `tokens_per_seq` rows a sequence; None: none fits."""
        batch = round_up(self._batch_buckets, sequences)
        tokens = round_up(ROWS_EACH, tokens_per_seq)
        if batch is None or tokens is None or batch * tokens > self._sizes.max_rows:
            return None
        return GraphKey(batch, tokens)


class _Staging:
    """One host and one device buffer of int32; every key's inputs are views of their beginnings.

    Of a key (B, k): token, position and slot of B * k rows, context lengths [B], tables [B, M]; behind them,
    outside the graph, where the batch's T rows were put and which rows are wanted.
    """

    def __init__(self, max_rows: int, max_batch: int, max_blocks: int, device: torch.device):
        self._blocks = max_blocks
        size = 5 * max_rows + max_batch * (1 + max_blocks)
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._array = self._host.numpy()
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._inputs: dict[GraphKey, DecoderInput] = {}

    @property
    def nbytes(self) -> int:
        """Device memory, in bytes."""
        return self._device.nbytes

    def blank(self, key: GraphKey, scratch_block: int, block_size: int) -> DecoderInput:
        """Static inputs of padding only, copied to the device."""
        _, lengths, tables = self._padding(key, scratch_block, block_size)
        end = 3 * key.batch_size * key.tokens + lengths.size + tables.size
        self._device[:end].copy_(self._host[:end])
        return self._input(key)

    def _padding(
        self, key: GraphKey, scratch_block: int, block_size: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Views of the host's buffer, filled with padding: by row [3, B * k], lengths [B], tables [B, M]."""
        rows = key.batch_size * key.tokens
        by_row = self._array[: 3 * rows].reshape(3, rows)
        by_row[:2], by_row[2] = 0, scratch_block * block_size
        lengths, tables = np.split(
            self._array[3 * rows :][: key.batch_size * (1 + self._blocks)], [key.batch_size]
        )
        lengths[:], tables[:] = 1, scratch_block
        return by_row, lengths, tables.reshape(key.batch_size, self._blocks)

    def fill(
        self, batch: DecoderInput, key: GraphKey, scratch_block: int, block_size: int
    ) -> tuple[DecoderInput, Tensor, Tensor]:
        """Pads `batch` to `key` and starts the copy: static inputs, rows [T] of the batch in them, rows wanted [R]."""
        starts, total = batch.query_start.numpy(), len(batch.token_ids)
        counts = np.diff(starts)
        assert counts.min() > 0 and counts.max() <= key.tokens, (
            "a sequence has no row, or more than tokens_per_seq"
        )
        sequences = len(counts)
        first = np.arange(sequences) * key.tokens
        place = np.repeat(first - starts[:-1], counts) + np.arange(total)
        (tokens, positions, slots), lengths, tables = self._padding(key, scratch_block, block_size)
        tokens[place], positions[place] = batch.token_ids.numpy(), batch.positions.numpy()
        slots[place] = batch.slot_mapping.numpy()
        lengths[:sequences] = batch.context_lens.numpy()
        known = batch.block_tables.numpy()
        tables[:sequences, : known.shape[1]] = known
        at = 3 * key.batch_size * key.tokens + lengths.size + tables.size
        wanted = place[batch.logit_rows.numpy()]
        end = at + total + len(wanted)
        self._array[at : at + total] = place
        self._array[at + total : end] = wanted
        self._device[:end].copy_(self._host[:end], non_blocking=True)
        return self._input(key), self._device[at : at + total], self._device[at + total : end]

    def _input(self, key: GraphKey) -> DecoderInput:
        known = self._inputs.get(key)
        if known is not None:
            return known
        rows = key.batch_size * key.tokens
        by_row = self._device[: 3 * rows].view(3, rows)
        lengths, tables = self._device[3 * rows :][: key.batch_size * (1 + self._blocks)].split(
            [key.batch_size, key.batch_size * self._blocks]
        )
        every = torch.arange(rows + 1, dtype=torch.int32, device=self._device.device)
        shaped = tables.view(key.batch_size, self._blocks)
        made = DecoderInput.of([*by_row, every[:: key.tokens], lengths, shaped, every[:rows]])
        return self._inputs.setdefault(key, made)
