"""`NativeEagle`: the EAGLE drafter on CPU, in C (`csrc/eagle.c`), beside the policy's `NativeDecoder`.

On one rank a whole draft is one call: feeding the missing pairs, LM head, keyed draws and every further step happen in
C. Under tensor parallelism each forward is one call, and rank 0's candidates count, so that ranks never part.

Legend: T pairs, S sequences, A of them still drafting, H hidden size, V vocabulary, L drafted tokens, K candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from ctypes import byref
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.errors import BackendError
from megatron_tlt.models.base import KVCache, Shard
from megatron_tlt.models.eagle.base import (
    BUCKETS,
    DEPTHS,
    DraftParams,
    DraftRecorder,
    DraftRows,
    EagleInput,
    gaps_of,
)
from megatron_tlt.models.eagle.model import check_eagle_tensors
from megatron_tlt.models.inputs import DecoderInput, DecoderOutput
from megatron_tlt.models.native.abi import BAD_POSITION, ERRORS, DraftCall, Eagle, EagleStep, library
from megatron_tlt.models.native.decoder import NativeDecoder, Numbers, copy_blocks
from megatron_tlt.models.native.parts import (
    Forward,
    PackedLayers,
    Packer,
    address,
    fill_step,
    kv_bytes_per_block,
    new_kv_cache,
    pad,
)

MOST_CANDIDATES = 4


class NativeEagle:
    """See `eagle_base.EagleDecoder`. Results ignore batch and threads, bit for bit, as the policy's do."""

    kind = "native"

    def __init__(self, policy: NativeDecoder, threads: int = 1, tp: TensorParallel | None = None):
        """`tp` is the policy's. The policy's embedding and LM head are read where they are, so it must stay alive."""
        self._lib, self.policy, self.threads = library(), policy, max(1, threads)
        self.config, self.dtype, self._tp = policy.config, policy.dtype, tp
        self._one = replace(policy.config, num_layers=1)
        self._shard = Shard(self._one, tp.rank if tp else 0, tp.size if tp else 1)
        h, is_bf16 = self.config.hidden_size, self.dtype == torch.bfloat16
        self._packer = Packer(is_bf16, self.threads)
        self._layers = PackedLayers(self._one, self._shard, self._packer, (h, 2 * h), input_norm=False)
        self._forward = Forward(self._one, self._shard, tp, is_bf16, self._layers)
        embed, head = policy.tables
        self._forward.model.embed, self._forward.model.head = embed.data_ptr(), head.data_ptr()
        self._eagle = Eagle(self._forward.model, self._layers.extra.data_ptr())
        self._eagle.pair = self._forward.buffer(pad(2 * h) + 64)
        self._input = EagleStep()
        self._loaded = False
        self._call, self._shape = DraftCall(), (0, 0, 0)
        self._space = DraftSpace(self._call, 1, 8, self._shard.vocab, h, self.dtype)
        self._arguments = (byref(self._eagle), byref(self._input), byref(self._call))

    # -- weights and cache ----------------------------------------------------------------------------------

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """See `EagleDecoder.load_weights`; nothing changes if it raises."""
        given = dict(named)
        check_eagle_tensors(given, self.config)
        for name, tensor in given.items():
            part, kind = name.split(".")[-2:]
            if part == "fc":
                self._packer.pack(self._layers.extra, tensor.detach())
            else:
                self._layers.load(0, part, kind, tensor)
        self._loaded = True

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Memory of one block, heads padded to the tiles' width."""
        return kv_bytes_per_block(self._one, self._shard, self.dtype, block_size)

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Zeroed, one layer. Raises ConfigError unless 16 divides `block_size`."""
        return new_kv_cache(num_blocks, block_size, self.kv_bytes_per_block(block_size))

    def copy_blocks(self, kv: KVCache, src: Numbers, dst: Numbers) -> None:
        """Copies block src[i] to dst[i], in order of i. Raises BackendError on wrong numbers."""
        copy_blocks(kv, src, dst, 1, self.kv_bytes_per_block(kv.block_size))

    # -- one pass -------------------------------------------------------------------------------------------

    def forward(self, inputs: EagleInput, kv: KVCache) -> DecoderOutput:
        """See `EagleDecoder.forward`. Raises BackendError as `NativeDecoder.forward` does; `parents` are refused."""
        self._point_at(inputs, kv)
        step, wanted = self._input.step, inputs.batch.logit_rows.shape[0]
        logits = torch.empty(wanted, self._shard.vocab)
        hidden = torch.empty(wanted, self.config.hidden_size, dtype=self.dtype)
        step.logits, step.hidden = logits.data_ptr(), hidden.data_ptr()
        step.logits_stride = self._shard.vocab
        arguments = (*self._arguments[:2], self.threads, self._forward.all_reduce)
        code = self._lib.tlt_eagle_forward(*arguments)
        if code == BAD_POSITION and self._grow_rope(int(inputs.batch.positions.max()) + 1):
            code = self._lib.tlt_eagle_forward(*arguments)
        self._check(code)
        return DecoderOutput(self._shard.gather_logits(self._tp, logits, self.config.vocab_size), hidden)

    def _check_ready(self) -> None:
        if not self._loaded or not self.policy.complete:
            raise BackendError("the drafter is used before its weights, or the policy's, were loaded")

    def _point_at(self, inputs: EagleInput, kv: KVCache) -> None:
        self._check_ready()
        batch, here = inputs.batch, self._input
        fill_step(here.step, batch, kv)
        here.states = address("hidden", inputs.hidden, batch.token_ids.shape[0], self.dtype)
        if inputs.hidden.shape[-1] != self.config.hidden_size:
            raise BackendError(f"hidden states of {inputs.hidden.shape[-1]}, not {self.config.hidden_size}")
        here.first_visible = address("first_visible", inputs.first_visible, batch.context_lens.shape[0])

    def _grow_rope(self, needed: int) -> bool:
        if not self._forward.grow_rope(needed):
            return False
        self._eagle.model = self._forward.model
        return True

    def _check(self, code: int) -> None:
        if code:
            error, self._forward.reduce_error = self._forward.reduce_error, None
            raise BackendError(f"native drafter refused: {ERRORS.get(code, code)}") from error

    # -- drafting -------------------------------------------------------------------------------------------

    def draft(self, inputs: EagleInput, params: DraftParams, kv: KVCache) -> DraftRows:
        """See `EagleDecoder.draft`. K is at most 4; entries that are not valid are 0.

        `batch.logit_rows` must be the last row of each sequence, and no sequence empty. Raises BackendError for that,
        for positions beyond the model or the block tables, and as `forward` does.
        """
        if not self.is_whole:
            self._check_topk(params.topk)
            return self._draft_in_steps(inputs, params, kv)
        self._point_at(inputs, kv)
        seqs, depth = self._input.step.seqs, max(params.max_len.tolist(), default=0)
        logits = None
        if params.want_logits:
            logits = np.zeros((seqs, depth, self.config.vocab_size), np.float32)
        space = self.open_call(
            seqs, depth, params.topk, params.min_cumulative_acceptance, params.rates, logits
        )
        space.copy(params, seqs)
        code = self.run_call(self._lib.tlt_eagle_draft, self._arguments[1])
        if code == BAD_POSITION and self.grow_rope(int(inputs.batch.positions.max()) + 1, depth):
            code = self.run_call(self._lib.tlt_eagle_draft, self._arguments[1])
        self._check(code)
        return space.results(seqs, depth, params.topk, logits)

    def _check_topk(self, topk: int) -> None:
        most = min(MOST_CANDIDATES, self.config.vocab_size)
        if not 1 <= topk <= most:
            raise BackendError(f"drafts of {topk} candidates: there may be 1 to {most}")

    # -- for those who draft in C themselves ----------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """Whether this rank has the whole drafter, so that a draft is one call."""
        return self._shard.size == 1

    def open_call(
        self,
        seqs: int,
        depth: int,
        topk: int,
        min_cumulative_acceptance: float,
        rates: np.ndarray,
        logits: np.ndarray | None = None,
    ) -> DraftSpace:
        """Room for `seqs` drafts of `depth` tokens, which the next `run_call` fills; keys, positions, temperatures and
        lengths are still to come. Raises BackendError before all weights are loaded and for wrong arguments.
        """
        self._check_ready()
        self._check_topk(topk)
        call, space = self._call, self._space
        if space.seqs < seqs or space.depth < depth:
            seqs_now, depth_now = max(seqs, 2 * space.seqs), max(depth, space.depth)
            space = DraftSpace(
                call, seqs_now, depth_now, self._shard.vocab, self.config.hidden_size, self.dtype
            )
            self._space = space
            self._shape = (0, 0, 0)
        space.set_rates(rates)
        call.min_cumulative_acceptance = min_cumulative_acceptance
        if self._shape != (seqs, depth, topk):  # mostly it is the last draft's
            self._shape = seqs, depth, topk
            call.topk, call.depth = topk, depth
            at, nodes = space.address, 4 * seqs * depth
            call.lengths, call.cumulative_acceptance, call.tokens = at, at + 4 * seqs, at + 4 * seqs + nodes
            call.gaps = at + 4 * seqs + nodes * (1 + topk)
        call.logits = None if logits is None else logits.ctypes.data
        return space

    def run_call(self, function: Callable[..., int], source: Any) -> int:
        """`function`(this drafter, `source`, the open call, threads): an error code."""
        return function(self._arguments[0], source, self._arguments[2], self.threads)

    def grow_rope(self, longest: int, depth: int) -> bool:
        """Room for drafts of `depth` tokens behind `longest` positions; False if the table cannot grow so far."""
        return self._grow_rope(min(longest + depth, self.config.max_position_embeddings))

    # -- drafting under tensor parallelism ------------------------------------------------------------------

    def _draft_in_steps(self, inputs: EagleInput, params: DraftParams, kv: KVCache) -> DraftRows:
        """As `csrc/eagle.c` does it, one forward at a time. All ranks take the same number of steps."""
        recorder = DraftRecorder(params, self.config.vocab_size)
        batch = inputs.batch
        ends, tables = batch.query_start[1:].numpy() - 1, batch.block_tables.numpy()
        if not np.array_equal(batch.logit_rows.numpy(), ends):
            raise BackendError("a draft's logit rows must be the last row of each sequence")
        position = batch.positions.numpy()[ends]
        out = self.forward(inputs, kv)
        active = np.flatnonzero(params.max_len > 0)
        logits, hidden = out.logits[torch.from_numpy(active)], out.hidden[torch.from_numpy(active)]
        for step in range(int(params.max_len.max(initial=0))):
            tokens, gaps = self._candidates(logits, params, active, step)
            goes_on = recorder.take(step, active, tokens, gaps, logits)
            active, best = active[goes_on], tokens[goes_on, 0]
            if not len(active):
                break
            pairs = _single_rows(best, position[active] + step + 1, tables[active], kv.block_size)
            states = hidden[torch.from_numpy(goes_on)]
            first = inputs.first_visible[torch.from_numpy(active)]
            out = self.forward(EagleInput(pairs, states, first), kv)
            logits, hidden = out.logits, out.hidden
        return recorder.result()

    def _candidates(
        self, logits: Tensor, params: DraftParams, active: np.ndarray, step: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rank 0's best tokens int32 [A, N] and gaps float32 [A, N] as in `DraftRows`; N = max(K, 2)."""
        assert self._tp is not None
        count, vocab = logits.shape
        n = min(max(params.topk, 2), vocab)
        where = np.ascontiguousarray(params.output_positions[active] + step, np.int32)
        keys, heat = params.keys[active], np.ascontiguousarray(params.temperature[active], np.float32)
        found = torch.empty(2, count, n, dtype=torch.int32)
        scratch = np.empty(self._lib.tlt_topk_scratch_bytes(count, vocab), np.uint8)
        same = np.arange(count, dtype=np.int32)
        self._lib.tlt_keyed_topk(
            *(logits.data_ptr(), count, vocab, logits.stride(0), heat.ctypes.data, keys.ctypes.data),
            *(where.ctypes.data, n, same.ctypes.data, found[0].data_ptr(), found[1].data_ptr()),
            *(scratch.ctypes.data, self.threads),
        )
        tokens, bits = self._tp.broadcast(found).numpy()
        return tokens, gaps_of(bits.view(np.float32))


class DraftSpace:
    """Memory for drafts of up to `seqs` sequences and `depth` tokens, allocated once; `call` points into it."""

    def __init__(self, call: DraftCall, seqs: int, depth: int, vocab: int, hidden: int, dtype: torch.dtype):
        self.seqs, self.depth = seqs, depth
        # lengths [S], cumulative acceptance [S, L], tokens [S, L, K], gaps [S, L, K] of the present draft, one behind
        # the other
        self._out = np.zeros(seqs * (1 + depth * (1 + 2 * MOST_CANDIDATES)), np.int32)
        self.address = self._out.ctypes.data
        self._keys, self._positions = np.zeros(seqs, np.uint64), np.zeros(seqs, np.int32)
        self._temperature, self._max_len = np.zeros(seqs, np.float32), np.zeros(seqs, np.int32)
        self._rates = np.zeros((DEPTHS, BUCKETS), np.float32)
        self._logits, self._hidden = torch.empty(seqs, vocab), torch.empty(seqs, hidden, dtype=dtype)
        self._work = np.zeros((6, seqs), np.int32)
        self._best = np.zeros(library().tlt_topk_scratch_bytes(seqs, vocab), np.uint8)
        call.keys, call.output_positions = self._keys.ctypes.data, self._positions.ctypes.data
        call.temperature, call.max_len = self._temperature.ctypes.data, self._max_len.ctypes.data
        call.rates, call.work, call.best = (a.ctypes.data for a in (self._rates, self._work, self._best))
        call.last_logits, call.last_hidden = self._logits.data_ptr(), self._hidden.data_ptr()

    def copy(self, params: DraftParams, seqs: int) -> None:
        """Takes the parameters; their types may differ. Raises BackendError for wrong lengths."""
        given = (params.keys, params.output_positions, params.temperature, params.max_len)
        if any(len(a) != seqs for a in given):
            raise BackendError(
                f"draft parameters of {[len(a) for a in given]} sequences, the input has {seqs}"
            )
        self._keys[:seqs], self._positions[:seqs] = params.keys, params.output_positions
        self._temperature[:seqs], self._max_len[:seqs] = params.temperature, params.max_len

    def set_rates(self, rates: np.ndarray) -> None:
        """Takes the match rates [DEPTHS, BUCKETS]. Raises BackendError for another shape."""
        if rates.shape != (DEPTHS, BUCKETS):
            raise BackendError(f"match rates {list(rates.shape)}, not {[DEPTHS, BUCKETS]}")
        self._rates[:] = rates

    def results(
        self, seqs: int, depth: int, k: int, logits: np.ndarray | None, count: int | None = None
    ) -> DraftRows:
        """Copies of what C wrote: of the first `count` drafts of a call that was opened for `seqs`."""
        nodes = seqs * depth
        a, b, c = seqs, seqs + nodes, seqs + nodes * (1 + k)
        out = self._out[: c + nodes * k].copy()
        floats, shape = out.view(np.float32), (seqs, depth, k)
        tokens, gaps = out[b:c].reshape(shape), floats[c:].reshape(shape)
        lengths, cumulative_acceptance = out[:a], floats[a:b].reshape(seqs, depth)
        n = seqs if count is None else count
        return DraftRows(
            lengths[:n],
            tokens[:n],
            gaps[:n],
            cumulative_acceptance[:n],
            None if logits is None else logits[:n],
        )


def _single_rows(
    tokens: np.ndarray, position: np.ndarray, tables: np.ndarray, block_size: int
) -> DecoderInput:
    """One pair of each of A sequences, at `position` [A]."""
    count = len(tokens)
    slots = tables[np.arange(count), position // block_size] * block_size + position % block_size
    starts = np.arange(count + 1)

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.int32))

    return DecoderInput(
        token_ids=tensor(tokens),
        positions=tensor(position),
        slot_mapping=tensor(slots),
        query_start=tensor(starts),
        context_lens=tensor(position + 1),
        block_tables=tensor(tables),
        logit_rows=tensor(starts[:-1]),
    )
