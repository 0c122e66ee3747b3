"""One step on the device: the scheduler's arrays become the decoder's input, its logits become tokens.

Legend: D decoding rows, T tokens, S sequences, R rows to sample, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.models.decoders.base import Decoder, empty_routed_experts
from megatron_tlt.models.decoders.draft import Draft
from megatron_tlt.models.decoders.inputs import DecoderInput, DecoderOutput, HostLengths
from megatron_tlt.models.decoders.keys import row_keys
from megatron_tlt.models.decoders.torch.transfer import upload
from megatron_tlt.rollout.batch import Batch, PrefillChunk, StepResult
from megatron_tlt.rollout.graph_pool import GraphPool
from megatron_tlt.rollout.paged_hidden_states import PagedHiddenStates
from megatron_tlt.rollout.request import Request
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.sampler import Sampler, SamplingRows
from megatron_tlt.rollout.speculation.verify import accept_matches

_NOTHING = StepResult(np.empty(0, np.int32), np.empty(0, np.float32))


class ModelRunner:
    """Runs batches. On CPU the decoder reads the scheduler's own memory, elsewhere one copy a step.

    With a pool decoding and verifying steps run through it, from the host's memory.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: Any,
        rows: RunningRows,
        block_size: int,
        sampler: Sampler,
        tp: TensorParallel,
        pool: GraphPool | None = None,
    ):
        self.pool = pool
        self.decoder, self.kv, self.rows, self.sampler, self.tp = decoder, kv, rows, sampler, tp
        self._block_size = block_size
        self.device = sampler.device
        self._uploads = self.device.type != "cpu"  # whether a forward's inputs are copied
        width = len(rows.token_ids)
        self._one_each = np.arange(width + 1, dtype=np.int32)
        self._decode_inputs: dict[int, DecoderInput] = {}
        self.pages: PagedHiddenStates | None = None  # hidden states of all cached tokens, where they are kept
        self._routed_experts: PagedHiddenStates | None = None  # of all cached tokens, where recorded

    def keep_pages(self) -> PagedHiddenStates:
        """From now on every forward writes its hidden states into `pages`. Only while no request runs. Mutates."""
        if self.pages is None:
            sizes = self.kv.num_blocks, self.kv.block_size, self.decoder.state_size
            self.pages = PagedHiddenStates(*sizes, self.decoder.dtype, self.device)
        return self.pages

    def record_routed_experts(self) -> None:
        """Records the experts of every token from now on, for `read_routed_experts`.

        Only while no request runs. Mutates the runner.
        """
        like = empty_routed_experts(0, self.decoder.config)
        assert like.shape[1], "a dense model"
        sizes = self.kv.num_blocks, self.kv.block_size, like.shape[1]
        self._routed_experts = PagedHiddenStates(*sizes, like.dtype, self.device)
        if self.kv.is_released:
            self._routed_experts.release()

    def drop_pages(self) -> None:
        """Stops keeping hidden states and frees their memory. Mutates."""
        self.pages = None

    def release(self) -> None:
        """Frees the memory of cache and hidden states until `resume`. Mutates."""
        is_captured = self.pool is not None and self.device.type == "cuda"
        assert self.kv.memory is not None or not is_captured, "graphs keep the cache's address"
        self.kv.release()
        for pages in self._kept:
            pages.release()

    def resume(self) -> None:
        """Allocates the memory again, zeroed, after a `release`. Mutates."""
        self.kv.resume(self.decoder.new_kv_cache)
        for pages in self._kept:
            pages.resume()

    @property
    def keeps_states(self) -> bool:
        """Whether something of every cached token is read when its request has ended."""
        return bool(self._kept)

    @property
    def _kept(self) -> list[PagedHiddenStates]:
        """The records of every cached token, in pages like those of keys and values."""
        return [pages for pages in (self.pages, self._routed_experts) if pages is not None]

    def read_routed_experts(self, request: Request) -> None:
        """Copies the experts of a finished request's tokens to the host, where they are recorded. Mutates."""
        if self._routed_experts is not None:
            count = len(request.prompt) + len(request.output) - 1
            read = self._routed_experts.start_read(request.blocks, count).wait_pageable()
            request.routed_experts = read.unflatten(1, (-1, self.decoder.config.num_experts_per_tok)).numpy()

    def forward(self, batch: Batch) -> StepResult:
        """Computes `batch` and samples its rows. Mutates the cache and the arrays past the decoding rows."""
        inputs = self._decode_input(batch.num_decode) if batch.is_decode else self._mixed_input(batch)
        return self._sample(batch, self._run(inputs, self.pool if batch.is_decode else None))

    def _run(self, inputs: DecoderInput, pool: GraphPool | None) -> DecoderOutput:
        """The forward. Writes the rows' hidden states and experts where they are kept."""
        inputs.all_hidden, inputs.all_routed_experts = self.pages is not None, self._routed_experts is not None
        output = self.decoder.forward(inputs, self.kv) if pool is None else pool.run(inputs)
        slots = inputs.slot_mapping if output.slots is None else output.slots
        if self._routed_experts is not None:
            assert output.routed_experts is not None
            self._routed_experts.write(slots, output.routed_experts)
        if self.pages is not None:
            assert output.hidden is not None
            self.pages.write(slots, output.hidden)
        return output

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies blocks (from, to) that forked requests write into. Mutates the cache and the hidden states."""
        if not copies:
            return
        src, dst = [c[0] for c in copies], [c[1] for c in copies]
        self.decoder.copy_blocks(self.kv, src, dst)
        for pages in self._kept:
            pages.copy_blocks(src, dst)

    def verify(self, draft: Draft) -> StepResult:
        """Feeds every row's last token and its draft; keeps the tokens that are accepted (`accept_matches`).

        The cache ends as plain decoding would have left it: slots behind the accepted tokens are written again before
        they are read. Mutates the cache.
        """
        fed = _FedRows.of(draft)
        pool = self.pool
        if pool is not None and pool.key(len(draft.counts), int(draft.counts.max()) + 1) is None:
            pool.graphs.stats.eager += 1
            pool = None  # more rows than its buffers hold
        output = self._run(self._verify_input(draft, fed, to_pool=pool is not None), pool)
        drawn, scores = self._draw(output.logits, self._running_rows(fed.request, fed.offset))
        accepted = accept_matches(drawn, draft)
        return StepResult(drawn[accepted.index], scores[accepted.index], accepted.counts, accepted)

    def _verify_input(self, draft: Draft, fed: _FedRows, to_pool: bool) -> DecoderInput:
        """Last tokens and their drafts as one ragged batch."""
        rows = self.rows
        size = self._block_size
        count = len(draft.counts)
        total = len(fed.request)
        tokens, positions = rows.token_ids[fed.request], rows.positions[fed.request] + fed.offset
        tokens[fed.offset > 0] = draft.tokens
        block, inside = np.divmod(positions, size)
        slots = rows.block_tables[fed.request, block] * size + inside
        context_lens = rows.positions[:count] + draft.counts + 1
        seen = (context_lens, rows.block_tables[:count])
        return self._to_input([tokens, positions, slots, fed.start, *seen, self._one_each[:total]], to_pool)

    def _running_rows(self, at: slice | np.ndarray, offset: np.ndarray | int = 0) -> SamplingRows:
        """Sampling parameters and keys of running rows `at`, for the token `offset` positions after their next one."""
        rows = self.rows
        keys = row_keys(rows.keys[at], rows.output_len[at] + offset)
        return SamplingRows(
            keys, rows.temperature[at], rows.top_k[at], rows.top_p[at], rows.min_p[at], rows.num_masked > 0
        )

    def _decode_input(self, count: int) -> DecoderInput:
        """Views of the rows' arrays: the same memory every step, so they are made once for each row count."""
        known = self._decode_inputs.get(count)
        if known is not None:
            return known
        to_pool = self.pool is not None
        made = self._pack(count, count, self._one_each[: count + 1], self._one_each[:count], to_pool)
        if to_pool or not self._uploads:
            self._decode_inputs[count] = made
        return made

    def _mixed_input(self, batch: Batch) -> DecoderInput:
        """Decoding rows and prefill chunks as one ragged batch."""
        decoding = batch.num_decode
        first = 0 if decoding else self.rows.num_rows  # chunks alone leave the arrays of the running rows as they are
        seqs = decoding + len(batch.chunks)
        query_start = np.empty(seqs + 1, np.int32)
        query_start[: decoding + 1] = self._one_each[: decoding + 1]
        at, last_rows = decoding, []
        for seq, chunk in enumerate(batch.chunks, decoding):
            at = self._fill_chunk(chunk, first + seq, first + at) - first
            query_start[seq + 1] = at
            if chunk.draws:
                last_rows.append(at - 1)
        if not batch.num_draws:
            last_rows.append(at - 1)  # not sampled: decoders need not handle batches without logits
        logit_rows = np.concatenate((self._one_each[:decoding], np.asarray(last_rows, np.int32)))
        return self._pack(at, seqs, query_start, logit_rows, to_pool=False, first=first)

    def _fill_chunk(self, chunk: PrefillChunk, seq: int, at: int) -> int:
        """Writes a chunk's tokens behind the rows already there; returns where it ends."""
        rows, size = self.rows, self._block_size
        end = at + chunk.end - chunk.start
        positions = np.arange(chunk.start, chunk.end, dtype=np.int32)
        table = np.asarray(chunk.prefill.blocks, np.int32)
        rows.token_ids[at:end] = chunk.prefill.tokens[chunk.start : chunk.end]
        rows.positions[at:end] = positions
        rows.slot_mapping[at:end] = table[positions // size] * size + positions % size
        rows.context_lens[seq] = chunk.end
        rows.block_tables[seq, : len(table)] = table
        return end

    def _pack(
        self,
        tokens: int,
        seqs: int,
        query_start: np.ndarray,
        logit_rows: np.ndarray,
        to_pool: bool,
        first: int = 0,
    ) -> DecoderInput:
        """The arrays' elements and rows from `first` on."""
        rows = self.rows
        at = slice(first, first + tokens)
        fed = (rows.token_ids[at], rows.positions[at], rows.slot_mapping[at])
        seen = (rows.context_lens[first : first + seqs], rows.block_tables[first : first + seqs])
        return self._to_input([*fed, query_start, *seen, logit_rows], to_pool)

    def _to_input(self, arrays: list[np.ndarray], to_pool: bool) -> DecoderInput:
        """A `DecoderInput` of seven int32 arrays: views (for the CPU, the pool) or one copy to the device."""
        if to_pool or not self._uploads:
            return DecoderInput.of([torch.from_numpy(a) for a in arrays])
        starts, lens, tables = arrays[3:6]
        longest = int(lens.max())
        arrays[5] = tables[:, : -(-longest // self._block_size)]
        flat = upload(np.concatenate([array.ravel() for array in arrays], dtype=np.int32), self.device)
        parts = flat.split([array.size for array in arrays])
        made = DecoderInput.of([part.view(a.shape) for part, a in zip(parts, arrays, strict=True)])
        made.lengths = HostLengths(np.diff(starts).tolist(), longest)
        return made

    def _sample(self, batch: Batch, output: DecoderOutput) -> StepResult:
        logits = output.logits
        if not batch.is_decode:
            if not batch.num_draws:
                return _NOTHING
            logits = _fan_out(logits, batch)
        return StepResult(*self._draw(logits, self._sampling_rows(batch)))

    def _draw(self, logits: Tensor, rows: SamplingRows) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int32 [R] and log-probabilities float32 [R] of `logits` [R, V]."""
        if self.tp.size == 1 and self.device.type == "cpu":
            tokens, logprobs = self.sampler.sample(logits, rows)
            return tokens.numpy(), logprobs.numpy()
        both = self.sampler.sample_packed(logits, rows)
        if self.tp.size > 1:
            self.tp.broadcast(both)  # ranks may round differently: rank 0 decides, so that they cannot drift apart
        drawn = both.cpu().numpy()  # the step's one wait for the device
        return drawn[0], drawn[1].view(np.float32)

    def _sampling_rows(self, batch: Batch) -> SamplingRows:
        running = self._running_rows(slice(batch.num_decode))
        first = batch.first_draws if batch.chunks else []
        return running.join(_first_rows(first)) if first else running


@dataclass(slots=True)
class _FedRows:
    """The T rows that a draft feeds: each request's last token, then its drafted ones."""

    start: np.ndarray  # int32 [D + 1], where each request's rows begin
    request: np.ndarray  # int64 [T], the running row
    offset: np.ndarray  # int32 [T], 0 for the last token: the row draws the token of output position t + offset

    @classmethod
    def of(cls, draft: Draft) -> _FedRows:
        sizes = draft.counts + 1
        start = np.zeros(len(sizes) + 1, np.int32)
        sizes.cumsum(out=start[1:])
        offset = np.arange(start[-1], dtype=np.int32) - np.repeat(start[:-1], sizes)
        return cls(start, np.arange(len(sizes)).repeat(sizes), offset)


def _first_rows(requests: list[Request]) -> SamplingRows:
    """Sampling parameters and keys of the tokens that `requests` draw behind their prompt and their `output`."""
    keys = np.array([r.key for r in requests], np.uint64)
    params = [r.params for r in requests]
    return SamplingRows(
        row_keys(keys, np.array([len(r.output) for r in requests], np.int32)),
        np.array([p.temperature for p in params], np.float32),
        np.array([p.top_k for p in params], np.int32),
        np.array([p.top_p for p in params], np.float64),
        np.array([p.min_p for p in params], np.float32),
        any(r.is_masked for r in requests),
    )


def _fan_out(logits: Tensor, batch: Batch) -> Tensor:
    """Repeats a finished prompt's row of logits for each of its samples: [D + prompts, V] to [D + F, V]."""
    counts = [len(c.prefill.children) for c in batch.chunks if c.draws]
    if all(count == 1 for count in counts):
        return logits
    repeats = [1] * batch.num_decode + counts
    return logits.index_select(0, upload(np.repeat(np.arange(len(repeats)), repeats), logits.device))
