"""`GraphPool`: the policy's decoding and verifying forwards in fixed shapes, captured as CUDA graphs on GPUs.

A forward is padded to a bucket of sequences and of rows for each (1: plain decoding; a last token and its draft:
verifying). Strategies that verify equally many tokens share graphs, and contexts of all lengths. All graphs read one
set of input buffers, write one set of output buffers and share one pool of temporary memory, since one runs at a
time. They are captured at the engine's start, as many as the budget has room for (`config/planning/graphs.py`), and
stay: weights and cache keep their addresses, also when the cache's memory is freed between rollouts
(`decoders/torch/fixed_memory.py`). Ranks of one engine capture the same steps, with their collectives. On CPU the same
static forwards run without a graph.

    host arrays --pad--> pinned buffer --one copy--> device buffers --graph--> output buffers --rows--> fresh tensors

Legend: S sequences, T their rows, B and k their buckets, M blocks of the longest context, V vocabulary, H hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.config.planning.graphs import ROWS_EACH, batch_buckets, captured_shapes, round_up
from megatron_tlt.models.decoders.base import KVCache, empty_routed_experts
from megatron_tlt.models.decoders.inputs import DecoderInput, DecoderOutput
from megatron_tlt.models.decoders.torch.decoder import TorchDecoder
from megatron_tlt.rollout.graph_capture import (
    CudaCapturer,
    EagerCapturer,
    GraphCache,
    StaticStep,
)

_log = logging.getLogger(__name__)


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
        self._decoder, self._kv = decoder, kv
        self._batch_buckets = batch_buckets(sizes.max_batch)
        self._max_rows = sizes.max_rows
        self._keys: dict[tuple[int, int], GraphKey | None] = {}  # by sequences and rows of each
        decoder.reserve_positions(sizes.max_context + ROWS_EACH[-1])
        self._staging = _Staging(sizes, kv.num_blocks, decoder.device)
        dtype, device = decoder.dtype, decoder.device
        self._logits = torch.zeros(sizes.max_rows, decoder.config.vocab_size, dtype=dtype, device=device)
        self._hidden = torch.zeros(sizes.max_rows, decoder.state_size, dtype=dtype, device=device)
        self._routed_experts = empty_routed_experts(sizes.max_rows, decoder.config, decoder.device)
        if capturer is None:
            is_cuda = decoder.device.type == "cuda"
            capturer = CudaCapturer(decoder.device) if is_cuda else EagerCapturer()
        fixed = sum(t.nbytes for t in (self._staging, self._logits, self._hidden, self._routed_experts))
        self.graphs = GraphCache(capturer, budget_bytes, fixed, decoder.tp)

    def capture(self, rows_each: int, others: Iterable[tuple[Hashable, StaticStep]] = ()) -> None:
        """Captures `others` (a drafter's steps) and forwards of up to `rows_each` rows a sequence, as far as the budget
        goes. Before the first request: writes to the cache's scratch block. Mutates.
        """
        shapes = captured_shapes(self._batch_buckets[-1], self._max_rows, rows_each)
        first, *keys = [GraphKey(*shape) for shape in shapes]
        self._capture(first)
        for key, step in others:
            self.graphs.capture(key, step)
        for key in keys:
            self._capture(key)
        _log.log(logging.WARNING if self.graphs.stats.refused else logging.INFO, self.graphs.report)

    def _capture(self, key: GraphKey) -> None:
        self.graphs.capture(key, self._step(key, self._staging.blank(key)))

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
        starts = batch.query_start.numpy()
        counts = starts[1:] - starts[:-1]
        key = self.key(counts.size, counts.max().item())
        assert key is not None, "more rows than the buffers hold"
        inputs, place, wanted = self._staging.fill(batch, key, counts)
        self.graphs.run(key, self._step(key, inputs))
        out = DecoderOutput(self._logits.index_select(0, wanted))
        if batch.all_hidden:
            out.hidden = self._hidden.index_select(0, place)
        if batch.all_routed_experts:
            out.routed_experts = self._routed_experts.index_select(0, place)
        if batch.all_hidden or batch.all_routed_experts:
            out.slots = inputs.slot_mapping.index_select(0, place)
        return out

    def key(self, sequences: int, tokens_per_seq: int) -> GraphKey | None:
        """The bucket of a batch of at most `tokens_per_seq` rows a sequence; None: none fits."""
        asked = sequences, tokens_per_seq
        if asked not in self._keys:
            self._keys[asked] = self._find_key(sequences, tokens_per_seq)
        return self._keys[asked]

    def _find_key(self, sequences: int, tokens_per_seq: int) -> GraphKey | None:
        batch = round_up(self._batch_buckets, sequences)
        tokens = round_up(ROWS_EACH, tokens_per_seq)
        if batch is None or tokens is None or batch * tokens > self._max_rows:
            return None
        return GraphKey(batch, tokens)


@dataclass(frozen=True, slots=True)
class _Views:
    """The buffers' beginnings as a key (B, k) divides them: arrays in the host's memory, tensors on the device."""

    by_row: np.ndarray  # [3, B * k]: token, position, slot
    lengths: np.ndarray  # [B], of contexts
    tables: np.ndarray  # [B, M]
    firsts: np.ndarray  # [B], each sequence's first row
    end: int  # elements of all of them
    inputs: DecoderInput


class _Staging:
    """One host and one device buffer of int32; every key's inputs are views of their beginnings.

    Of a key (B, k): token, position and slot of B * k rows, context lengths [B], tables [B, M]; behind them,
    outside the graph, where the batch's T rows were put and which rows are wanted.
    """

    def __init__(self, sizes: PoolSizes, scratch_block: int, device: torch.device):
        """Rows of padding write into `scratch_block`."""
        self._blocks, self._scratch_block = sizes.max_blocks, scratch_block
        self._scratch_slot = scratch_block * sizes.block_size
        size = 5 * sizes.max_rows + batch_buckets(sizes.max_batch)[-1] * (1 + self._blocks)
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._array = self._host.numpy()
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._every = np.arange(sizes.max_rows)
        self._views: dict[GraphKey, _Views] = {}

    @property
    def nbytes(self) -> int:
        """Device memory, in bytes."""
        return self._device.nbytes

    def blank(self, key: GraphKey) -> DecoderInput:
        """Static inputs of padding only, copied to the device."""
        views = self._views_of(key)
        self._pad(views, 0)
        self._device[: views.end].copy_(self._host[: views.end])
        return views.inputs

    def _pad(self, views: _Views, sequences: int) -> None:
        """Padding in every row, and in the lengths and tables behind the first `sequences`."""
        views.by_row[:2], views.by_row[2] = 0, self._scratch_slot
        views.lengths[sequences:], views.tables[sequences:] = 1, self._scratch_block

    def fill(self, batch: DecoderInput, key: GraphKey, counts: np.ndarray) -> tuple[DecoderInput, Tensor, Tensor]:
        """Pads `batch`, of `counts` [S] rows a sequence, to `key` and starts the copy: static inputs, rows [T] of the
        batch in them, rows wanted [R].
        """
        assert counts.all(), "a sequence has no row"
        views, sequences, total = self._views_of(key), counts.size, batch.token_ids.numel()
        place = (views.firsts[:sequences] - batch.query_start.numpy()[:-1]).repeat(counts)
        place += self._every[:total]
        if total < views.by_row.shape[1]:
            self._pad(views, sequences)
        views.by_row[0, place] = batch.token_ids.numpy()
        views.by_row[1, place] = batch.positions.numpy()
        views.by_row[2, place] = batch.slot_mapping.numpy()
        views.lengths[:sequences] = batch.context_lens.numpy()
        known = batch.block_tables.numpy()
        width = known.shape[1]
        views.tables[:sequences, :width], views.tables[:sequences, width:] = known, self._scratch_block
        wanted = place[batch.logit_rows.numpy()]
        middle = views.end + total
        end = middle + wanted.size
        self._array[views.end : middle] = place
        self._array[middle:end] = wanted
        self._device[:end].copy_(self._host[:end], non_blocking=True)
        return views.inputs, self._device[views.end : middle], self._device[middle:end]

    def _views_of(self, key: GraphKey) -> _Views:
        if key not in self._views:
            self._views[key] = self._divide(key)
        return self._views[key]

    def _divide(self, key: GraphKey) -> _Views:
        rows, batch = key.batch_size * key.tokens, key.batch_size
        sizes = [3 * rows, batch, batch * self._blocks]
        end = sum(sizes)
        by_row, lengths, tables = self._device[:end].split(sizes)
        every = torch.arange(rows + 1, dtype=torch.int32, device=self._device.device)
        inputs = DecoderInput.of(
            [*by_row.view(3, rows), every[:: key.tokens], lengths, tables.view(batch, self._blocks), every[:rows]]
        )
        host_rows, host_lengths, host_tables = (part.numpy() for part in self._host[:end].split(sizes))
        shaped = host_tables.reshape(batch, self._blocks)
        firsts = np.arange(0, rows, key.tokens)
        return _Views(host_rows.reshape(3, rows), host_lengths, shaped, firsts, end, inputs)
