"""`TorchEagle`: a trained drafter in rollouts of the PyTorch decoder, a `PairModel` over a paged cache of one layer.

One drafted position of all chains is one step over fixed buffers, run as it is or by a CUDA graph (`run_step`). A draft
is one copy to the device, its steps one behind the other, each fed with the best candidates of the one before, and one
copy back:

    host: positions, slots, noise keys of all steps --> buffers --step--step--step--> candidates of all steps --> host

The host decides afterwards where each chain ends. Steps that no chain can reach are not run.

Legend: T pairs, B running rows, A chains that were begun, A' of them still drafting, P the padded number of chains,
N steps, M blocks of the longest context, H hidden size, W width of a state, V vocabulary, C candidates looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from megatron_tlt.errors import BackendError
from megatron_tlt.models.base import KVCache
from megatron_tlt.models.draft import Draft
from megatron_tlt.models.drafter_decoder import (
    DrafterDecoder,
    DraftingRows,
    DraftRecorder,
    Pairs,
    RowDrafter,
    RunStep,
    missing_pairs,
    slots_of,
    step_batches,
)
from megatron_tlt.models.drafters import DrafterConfig
from megatron_tlt.models.eagle.eagle3 import build_model
from megatron_tlt.models.inputs import DecoderInput
from megatron_tlt.models.keyed_noise import Candidates, best_candidates
from megatron_tlt.models.keys import row_keys
from megatron_tlt.models.torch.attention import AttentionPlan, StaticPlan
from megatron_tlt.models.torch.decoder import TorchDecoder
from megatron_tlt.models.torch.layers import joined
from megatron_tlt.models.torch.paged import PagedPlan
from megatron_tlt.models.torch.transfer import upload


class TorchEagle(DrafterDecoder):
    """See `DrafterDecoder`. Cache: [2, (num_blocks + 1) * block_size, kv heads, D]; the last block is scratch."""

    kind = "torch"

    def __init__(
        self, policy: TorchDecoder, config: DrafterConfig, candidates: Candidates = best_candidates
    ):
        """The policy's tables are read from `policy` at every call. `candidates` may overwrite its logits."""
        self.policy, self.config, self.candidates = policy, config, candidates
        self.device, self.dtype = policy.device, policy.dtype
        self._layer = config.layer
        self.model = build_model(config).to(policy.device, policy.dtype).requires_grad_(False)
        attention, mlp = self.model.block.self_attn, self.model.block.mlp
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._qkv = joined([part.weight for part in parts])
        self._qkv_bias = joined([part.bias for part in parts]) if config.layer.qkv_bias else None
        self._gate_up = joined([mlp.gate_proj.weight, mlp.up_proj.weight])
        # Rows of the policy's LM head, in place since graphs keep the address, and the version of it that they are of.
        self._head_rows: Tensor | None = None
        self._head_version: int | None = None
        if config.reduced and self.model.imitates_states:
            shape = config.draft_vocab_size, config.policy.hidden_size
            self._head_rows = torch.empty(shape, dtype=policy.dtype, device=policy.device)
        self.run_step: RunStep = lambda _key, step: step()
        self._loaded = False

    def use_graphs(self, run_step: RunStep) -> None:
        """From now on steps run by `run_step(key, step)` (`GraphCache.run`). Mutates."""
        self.run_step = run_step

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Zeroed; allocated at once, one scratch block included."""
        shape = (2, (num_blocks + 1) * block_size, self._layer.num_kv_heads, self._layer.head_dim)
        return KVCache(num_blocks, block_size, torch.zeros(shape, dtype=self.dtype, device=self.device))

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block."""
        return 2 * block_size * self._layer.num_kv_heads * self._layer.head_dim * self.dtype.itemsize

    def copy_blocks(self, kv: KVCache, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copies block src[i] to dst[i], in order of i."""
        blocks = kv.data.unflatten(1, (-1, kv.block_size))
        for a, b in zip(src, dst, strict=True):
            blocks[:, b] = blocks[:, a]

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """See `DrafterDecoder.load_weights`."""
        self.model.load_full(named)
        self._loaded, self._head_version = True, None

    def refresh_head(self) -> None:
        """Copies the rows of a reduced vocabulary from the policy's LM head after a weight sync has replaced it.
        Collective with tensor parallelism.
        """
        ids, version = self.model.token_ids(), self.policy.head_version
        if self._head_rows is not None and ids is not None and self._head_version != version:
            torch.index_select(self.policy.lookup_tables()[1], 0, ids, out=self._head_rows)
            self._head_version = version

    @torch.inference_mode()
    def feed(self, pairs: Pairs, pages: Tensor, kv: KVCache) -> None:
        """See `DrafterDecoder.feed`. Raises BackendError before weights were loaded."""
        if not self._loaded:
            raise BackendError("the drafter is used before its weights were loaded")
        arrays = (pairs.tokens, pairs.positions, pairs.slots, pairs.state_slots)
        tokens, positions, slots, states = upload(np.stack(arrays), self.device).long()
        x = self.model.join(self.policy.embed(tokens), self.model.previous(pages[states]))
        self._cache(kv, slots, x, self.model.rope(positions, int(pairs.positions.max(initial=0)) + 1))

    def _cache(self, kv: KVCache, slots: Tensor, x: Tensor, rope: Tensor) -> None:
        kv.data[0][slots], kv.data[1][slots] = self.model.keys_values(x, rope)

    def row_drafter(self, kv: KVCache, rows: DraftingRows, pages: Tensor, catch_up: int) -> TorchRowDrafter:
        """See `DrafterDecoder.row_drafter`."""
        return TorchRowDrafter(self, kv, rows, pages, catch_up)

    def step(
        self, fed: DecoderInput, hidden: Tensor, first_visible: Tensor, kv: KVCache
    ) -> tuple[Tensor, Tensor]:
        """One pair of each of P chains, whose `previous` is `hidden` [P, H]: logits float32 [P, V] and outputs [P, H].

        No value comes to the host. Mutates the cache.
        """
        layer, ops, eps = self.model.block, self.policy.ops, self._layer.rms_norm_eps
        rope, norms = self.model.rope(fed.positions), None
        if self._layer.qk_norm:
            norms = layer.self_attn.q_norm.weight, layer.self_attn.k_norm.weight, eps
        x = self.model.join(self.policy.embed(fed.token_ids), hidden)
        qkv = linear(x, self._qkv, self._qkv_bias)
        q = ops.rotate_into(qkv, norms, rope, fed.slot_mapping, kv.data)
        attended = self._plan(fed, first_visible, kv.block_size).attend(q, kv.data[0], kv.data[1])
        part = linear(attended.flatten(1), layer.self_attn.o_proj.weight)
        residual = self.model.residual(x, hidden)
        x, h = ops.add_norm(residual, part, layer.post_attention_layernorm.weight, eps)
        out = x + linear(ops.gated_silu(linear(h, self._gate_up)), layer.mlp.down_proj.weight)
        if self._head_rows is not None:
            return self.model.spread(linear(out, self._head_rows)), out
        if self.model.imitates_states:  # through the policy's LM head, which may be sharded
            return self.policy.logits(out), out
        return self.model.full_logits(out), out

    def _plan(self, fed: DecoderInput, first_visible: Tensor, block_size: int) -> AttentionPlan:
        kv_heads = self._layer.num_kv_heads
        group = self._layer.num_heads // kv_heads
        if self.policy.paged is None:
            return StaticPlan(fed, block_size, 1, first_visible)
        return PagedPlan(self.policy.paged, fed, block_size, (kv_heads, group), 1, first_visible)


@dataclass(frozen=True, slots=True)
class _DraftInputs:
    """The inputs of a draft of N steps, of each of P chains: views of one int64 array, which is copied to the device
    once. `of` makes them on either side.
    """

    state_slots: Tensor  # [P], of the state that the chain's first pair reads
    temperature: Tensor  # float64 [P], the same bytes as int64
    tokens: Tensor  # [P], the chain's last token
    first_visible: Tensor  # [P], first position that the chain attends to
    places: Tensor  # [N, 3, P], of each step: position, slot, and the bits of the noise key
    block_tables: Tensor  # [M, P]

    @classmethod
    def of(cls, array: Tensor, steps: int) -> _DraftInputs:
        """The views of `array` int64 [rows(steps, M), P]."""
        states, temperature, tokens, first = array[:4]
        places, tables = array[4 : 4 + 3 * steps], array[4 + 3 * steps :]
        places = places.view(steps, 3, array.shape[1])
        return cls(states, temperature.view(torch.float64), tokens, first, places, tables)

    @staticmethod
    def rows(steps: int, blocks: int) -> int:
        """Rows of the array of `steps` steps and tables of `blocks` blocks."""
        return 4 + 3 * steps + blocks


class _StepBuffers:
    """Inputs and outputs of a step of P chains. The tensors stay in place: captured graphs keep their addresses."""

    def __init__(self, chains: int, max_blocks: int, eagle: TorchEagle):
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=eagle.device)

        hidden_size = eagle.config.policy.hidden_size
        self.tokens, self.first_visible = zeros(chains), zeros(chains)
        self.places = zeros(3, chains)  # set by one copy: position, slot and noise key
        self.positions, self.slots, self.keys = self.places
        self.block_tables = zeros(max_blocks, chains)
        self.temperature = zeros(chains, dtype=torch.float32)
        self.hidden = zeros(chains, hidden_size, dtype=eagle.dtype)  # read: the state of the position before
        self.next_hidden = torch.zeros_like(self.hidden)  # written: the chain's output
        self.num_candidates = min(2, eagle.config.draft_vocab_size)  # the second gives the gap
        self.best = zeros(2, chains, self.num_candidates, dtype=torch.float64)  # written: scores, candidates

    def fill_with_padding(self, scratch_slot: int, scratch_block: int) -> None:
        """Sets the inputs of chains that only write to scratch. Mutates."""
        self.tokens.zero_()
        self.places.zero_()
        self.slots.fill_(scratch_slot)
        self.first_visible.fill_(1)
        self.block_tables.fill_(scratch_block)


class TorchRowDrafter(RowDrafter):
    """See `RowDrafter`."""

    def __init__(self, eagle: TorchEagle, kv: KVCache, rows: DraftingRows, pages: Tensor, catch_up: int):
        self._eagle, self._rows, self._catch_up_limit = eagle, rows, catch_up
        self.point_at(kv, pages)
        self._size = kv.block_size
        self._most, self._max_blocks = rows.block_tables.shape
        self._buffers = _StepBuffers(self._most, self._max_blocks, eagle)
        eagle.model.reserve_positions(self._max_blocks * self._size, eagle.device)

    def steps(self) -> list[tuple[Hashable, Callable[[], object]]]:
        """Every static step with its key, the largest first. Sets the inputs to padding."""
        self._buffers.fill_with_padding(self._kv.num_blocks * self._size, self._kv.num_blocks)
        return [self._static(batch, self._max_blocks) for batch in step_batches(self._most)]

    @torch.inference_mode()
    def draft(self, wanted: np.ndarray, rates: np.ndarray, min_acceptance: float) -> Draft:
        """See `RowDrafter.draft`."""
        rows, count = self._rows, len(wanted)
        fresh = rows.synced[rows.slot[:count]] < rows.positions[:count]
        active = np.flatnonzero((wanted > 0) & fresh)
        recorder = DraftRecorder(count, rates, min_acceptance)
        if not len(active):
            return recorder.result()
        if (pairs := missing_pairs(rows, active, self._catch_up_limit, self._size, but=1)) is not None:
            self._eagle.feed(pairs, self._pages, self._kv)
        self._eagle.refresh_head()
        wanted = wanted[active]
        places, blocks = self._begin(active, wanted, recorder.reachable(int(wanted.max())))
        run = self._static(places.shape[2], blocks)
        found: list[Tensor] = []  # of each step: scores and candidates, best first, float64 [2, P, C]
        for place in places:
            self._set_inputs(place, found[-1] if found else None)
            self._eagle.run_step(*run)
            found.append(self._buffers.best[:, : place.shape[1]].clone())
            if (tp := self._eagle.policy.tp) is not None:
                tp.broadcast(found[-1])  # all ranks go on with the same tokens
        results = torch.stack(found).cpu().numpy() if found else ()  # the draft's one wait for the device
        at = np.arange(len(active))  # of the chains that go on
        for number, (scores, candidates) in enumerate(results):
            best, score = candidates[at].astype(np.int32), scores[at].astype(np.float32)
            at = at[recorder.record(number, active[at], best, score, wanted[at] > number + 1)]
            if not len(at):
                break
        return recorder.result()

    def _table_width(self, length: int) -> int:
        """Blocks of each table that a draft up to `length` positions reads: all with the paged kernel, whose captured
        graphs have one shape and which skips the rest; the other attention gathers every block that it is given.
        """
        return self._max_blocks if self._eagle.policy.paged is not None else -(-length // self._size)

    def _begin(self, active: np.ndarray, wanted: np.ndarray, steps: int) -> tuple[Tensor, int]:
        """Uploads the inputs of a draft of `steps` steps in one copy, and sets those that all steps or step 0 read.

        Returns the places of each step, int64 [N, 3, P], and the number of blocks that the tables have.
        """
        batch = min(1 << (len(active) - 1).bit_length(), self._most)
        blocks = self._table_width(int((self._rows.positions[active] + wanted).max()))
        host = torch.zeros(_DraftInputs.rows(steps, blocks), batch, dtype=torch.int64)
        self._plan(_DraftInputs.of(host, steps), active, wanted)
        inputs, buffers = _DraftInputs.of(upload(host.numpy(), self._eagle.device), steps), self._buffers
        buffers.next_hidden[:batch] = self._eagle.model.previous(self._pages[inputs.state_slots])
        buffers.temperature[:batch] = inputs.temperature
        buffers.tokens[:batch] = inputs.tokens
        buffers.first_visible[:batch] = inputs.first_visible
        buffers.block_tables[:blocks, :batch] = inputs.block_tables
        return inputs.places, blocks

    def _plan(self, host: _DraftInputs, active: np.ndarray, wanted: np.ndarray) -> None:
        """Writes the inputs of chains `active` [A] into `host`, and padding behind them. Mutates `host`."""
        rows, count = self._rows, len(active)
        position, slot = rows.positions[active], rows.slot[active]
        host.state_slots.numpy()[:count] = slots_of(rows, active, position - 1, self._size)
        host.temperature.numpy()[:count] = rows.temperature[active]
        host.tokens.numpy()[:count] = rows.outputs[slot, rows.output_len[active] - 1]
        host.first_visible.fill_(1).numpy()[:count] = rows.first[slot]
        tables = host.block_tables.fill_(self._kv.num_blocks).numpy()
        tables[:, :count] = rows.block_tables[active, : len(tables)].T
        host.places[:, 1] = self._kv.num_blocks * self._size
        for step, place in enumerate(host.places.numpy()):
            at = np.flatnonzero(wanted > step)
            now = position[at] + step
            keys = row_keys(rows.keys[active[at]], rows.output_len[active[at]] + step)
            place[:, at] = now, slots_of(rows, active[at], now, self._size), keys.view(np.int64)

    def _set_inputs(self, place: Tensor, last: Tensor | None) -> None:
        """Sets the inputs of the step of one position: `place` int64 [3, P], and the candidates of `last` float64
        [2, P, C], the step before. No value comes to the host.
        """
        batch, buffers = place.shape[1], self._buffers
        buffers.places[:, :batch] = place
        if last is not None:
            _, candidates = last
            buffers.tokens[:batch] = candidates[:, 0]
        buffers.hidden[:batch] = buffers.next_hidden[:batch]

    def _static(self, batch: int, blocks: int) -> tuple[Hashable, Callable[[], object]]:
        """The step of so many padded chains, with its key: `blocks` is the same wherever there are graphs."""
        return ("drafter", batch), partial(self._compute, batch, blocks)

    def _compute(self, batch: int, blocks: int) -> None:
        """The step: reads and writes buffers only; running it again gives the same."""
        buffers = self._buffers
        starts = torch.arange(batch + 1, device=buffers.tokens.device)
        positions = buffers.positions[:batch]
        fed = DecoderInput(
            token_ids=buffers.tokens[:batch],
            positions=positions,
            slot_mapping=buffers.slots[:batch],
            query_start=starts,
            context_lens=positions + 1,
            block_tables=buffers.block_tables[:blocks, :batch].T,
            logit_rows=starts[:-1],
        )
        logits, hidden = self._eagle.step(fed, buffers.hidden[:batch], buffers.first_visible[:batch], self._kv)
        keys, temperature = buffers.keys[:batch], buffers.temperature[:batch]
        best, chosen = self._eagle.candidates(logits, keys, temperature, buffers.num_candidates)
        buffers.next_hidden[:batch].copy_(hidden)
        buffers.best[0, :batch].copy_(best)
        buffers.best[1, :batch].copy_(chosen)
