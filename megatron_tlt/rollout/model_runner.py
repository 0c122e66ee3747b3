"""One step on the device: the scheduler's arrays become the decoder's input, its logits become tokens.

Legend: D decoding rows, T tokens, S sequences, R rows to sample, V vocabulary, H hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.models.inputs import DecoderInput, DecoderOutput
from megatron_tlt.rollout.batch import Batch, Chunk, StepResult
from megatron_tlt.rollout.keys import row_keys
from megatron_tlt.rollout.request import Request
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.sampler import Sampler, SamplingRows

_NOTHING = StepResult(np.empty(0, np.int32), np.empty(0, np.float32))


class DecoderLike(Protocol):
    """What the engine needs of a decoder (`models.factory.build_decoder` makes one)."""

    kind: str

    def new_kv_cache(self, num_blocks: int, block_size: int) -> Any:
        """Memory for the keys and values of `num_blocks` blocks."""

    def copy_blocks(self, kv: Any, src: list[int], dst: list[int]) -> None:
        """Copies whole blocks. Mutates `kv`."""

    def load_weights(self, named: Iterable[tuple[str, Tensor]], partial: bool = False) -> None:
        """Takes full tensors under Hugging Face names (`partial`: only some). Mutates the weights."""

    def forward(self, batch: DecoderInput, kv: Any) -> DecoderOutput:
        """One step; writes the new keys and values into `kv`."""


class ModelRunner:
    """Runs batches. On CPU the decoder reads the scheduler's own memory, elsewhere one copy a step."""

    def __init__(
        self,
        decoder: DecoderLike,
        kv: Any,
        rows: RunningRows,
        block_size: int,
        sampler: Sampler,
        tp: TensorParallel,
    ):
        self.decoder, self.kv, self.rows, self.sampler, self.tp = decoder, kv, rows, sampler, tp
        self.forward_seconds = 0.0
        self.sample_seconds = 0.0
        self._block_size = block_size
        self._device = sampler.device
        max_rows, width = len(rows.limit), len(rows.token_ids)
        self._one_each = np.arange(max_rows + 1, dtype=np.int32)
        self._decode_inputs: dict[int, DecoderInput] = {}
        self._upload: _Upload | None = None
        if self._device.type != "cpu":
            self._upload = _Upload(6 * width + 1 + rows.block_tables.size, self._device)

    def forward(self, batch: Batch) -> StepResult:
        """Computes `batch` and samples its rows. Mutates the cache and the arrays past the decoding rows."""
        started = time.perf_counter()
        if batch.copies:
            self.decoder.copy_blocks(self.kv, [c[0] for c in batch.copies], [c[1] for c in batch.copies])
        inputs = self._decode_input(batch.num_decode) if batch.is_decode else self._mixed_input(batch)
        output = self.decoder.forward(inputs, self.kv)
        ran = time.perf_counter()
        self.forward_seconds += ran - started
        result = self._sample(batch, output)
        self.sample_seconds += time.perf_counter() - ran
        return result

    def _decode_input(self, count: int) -> DecoderInput:
        """Views of the rows' arrays: the same memory every step, so they are made once for each row count."""
        known = self._decode_inputs.get(count)
        if known is not None:
            return known
        made = self._pack(count, count, self._one_each[: count + 1], self._one_each[:count])
        if self._upload is None:
            self._decode_inputs[count] = made
        return made

    def _mixed_input(self, batch: Batch) -> DecoderInput:
        """Decoding rows and prefill chunks as one ragged batch: to the model they are the same thing."""
        decoding = batch.num_decode
        seqs = decoding + len(batch.chunks)
        query_start = np.empty(seqs + 1, np.int32)
        query_start[: decoding + 1] = self._one_each[: decoding + 1]
        at, last_rows = decoding, []
        for seq, chunk in enumerate(batch.chunks, decoding):
            at = self._fill_chunk(chunk, seq, at)
            query_start[seq + 1] = at
            if chunk.draws:
                last_rows.append(at - 1)
        if not batch.num_draws:
            last_rows.append(at - 1)  # nobody draws from it: decoders need not know of batches without logits
        logit_rows = np.concatenate((self._one_each[:decoding], np.asarray(last_rows, np.int32)))
        return self._pack(at, seqs, query_start, logit_rows)

    def _fill_chunk(self, chunk: Chunk, seq: int, at: int) -> int:
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

    def _pack(self, tokens: int, seqs: int, query_start: np.ndarray, logit_rows: np.ndarray) -> DecoderInput:
        rows = self.rows
        context_lens, tables = rows.context_lens[:seqs], rows.block_tables[:seqs]
        if self._upload is not None:
            tables = tables[:, : -(-int(context_lens.max()) // self._block_size)]
        arrays = (
            rows.token_ids[:tokens],
            rows.positions[:tokens],
            rows.slot_mapping[:tokens],
            query_start,
            context_lens,
            tables,
            logit_rows,
        )
        if self._upload is not None:
            return DecoderInput(*self._upload(arrays))
        return DecoderInput(*(torch.from_numpy(a) for a in arrays))

    def _sample(self, batch: Batch, output: DecoderOutput) -> StepResult:
        logits = output.logits
        if not batch.is_decode:
            if not batch.num_draws:
                if self._upload is not None:
                    self._upload.wait()
                return _NOTHING
            logits = _fan_out(logits, batch)
        tokens, logprobs = self.sampler.sample(logits, self._sampling_rows(batch))
        if self.tp.size > 1:
            # Ranks may round differently: one rank decides, so that they cannot drift apart.
            both = self.tp.broadcast(torch.stack((tokens, logprobs.view(torch.int32))))
            tokens, logprobs = both[0], both[1].view(torch.float32)
        if self._upload is not None:
            tokens, logprobs = tokens.cpu(), logprobs.cpu()
        return StepResult(tokens.numpy(), logprobs.numpy())

    def _sampling_rows(self, batch: Batch) -> SamplingRows:
        rows, n = self.rows, batch.num_decode
        keys = row_keys(rows.keys[:n], rows.output_len[:n])
        masked = rows.num_masked > 0
        running = SamplingRows(
            keys, rows.temperature[:n], rows.top_k[:n], rows.top_p[:n], rows.min_p[:n], masked
        )
        first = batch.first_draws if batch.chunks else []
        return running.join(_first_rows(first)) if first else running


def _first_rows(requests: list[Request]) -> SamplingRows:
    """How the first tokens of `requests` are sampled."""
    keys = np.array([r.key for r in requests], np.uint64)
    params = [r.params for r in requests]
    return SamplingRows(
        row_keys(keys, np.zeros(len(requests), np.int32)),
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
    repeats = torch.tensor([1] * batch.num_decode + counts, device=logits.device)
    return logits.repeat_interleave(repeats, dim=0, output_size=batch.num_decode + sum(counts))


class _Upload:
    """One pinned staging buffer and one device buffer: all int32 inputs of a step cross in a single copy."""

    def __init__(self, size: int, device: torch.device):
        self._host = torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._array = self._host.numpy()
        self._device = torch.empty(size, dtype=torch.int32, device=device)

    def __call__(self, arrays: tuple[np.ndarray, ...]) -> list[Tensor]:
        """Device tensors of the arrays' shapes, valid until the next call."""
        at, views = 0, []
        for array in arrays:
            self._array[at : at + array.size].reshape(array.shape)[...] = array
            views.append(self._device[at : at + array.size].view(array.shape))
            at += array.size
        # The host buffer is written again only after this step's tokens came back (or `wait`).
        self._device[:at].copy_(self._host[:at], non_blocking=True)
        return views

    def wait(self) -> None:
        """Returns when the last copy is done (a step that reads no result back must ask)."""
        if self._device.is_cuda:
            torch.cuda.current_stream(self._device.device).synchronize()
