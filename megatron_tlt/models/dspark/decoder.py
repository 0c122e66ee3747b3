"""`TorchBlock`: a block drafter in rollouts, in PyTorch, beside either of the policy's decoders.

The cache holds keys and values of the features, of all layers, in the slots of the policy's block tables: slot s has
the feature of the token at s. A block's own keys and values live for one forward, so a rejected draft leaves nothing
behind. A pair (token at s, state of s - 1; see `drafter_decoder`) caches the feature of s - 1.

A draft is one copy to the device, one step over fixed buffers, and one copy back. The step, forward and token loop
alike, has static shapes and brings no value to the host, so a CUDA graph can capture it:

    anchors, keys --> block forward --> LM head --> [bias of the token before, noise, best candidate] x N --> host

DFlash 2 takes the 16 largest logits of each slot before the loop, and its selector's scores as the bias.

It costs the same whatever the length of the drafts; the host decides afterwards where each draft ends.

Legend: T pairs, P padded rows, S slots of a block, N drafted tokens of a block, M blocks of a table, L = M * block
size, H hidden size, Vd the drafter's vocabulary, C candidates looked at, n layers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from megatron_tlt.config.block_drafters import NUM_CANDIDATES
from megatron_tlt.errors import BackendError
from megatron_tlt.models.base import Decoder, KVCache
from megatron_tlt.models.draft import Draft
from megatron_tlt.models.drafter_decoder import (
    DrafterDecoder,
    DraftingRows,
    DraftRecorder,
    Pairs,
    RowDrafter,
    RunStep,
    missing_pairs,
    step_batches,
)
from megatron_tlt.models.dspark.config import BlockConfig
from megatron_tlt.models.dspark.model import BlockLayer, BlockModel
from megatron_tlt.models.keyed_noise import Candidates, best_candidates
from megatron_tlt.models.keys import row_keys
from megatron_tlt.models.torch.attention import gather_heads, table_slots
from megatron_tlt.models.torch.decoder import TorchDecoder
from megatron_tlt.models.torch.layers import joined, rms_norm, rotate
from megatron_tlt.models.torch.transfer import upload

_GATHERED_BYTES = 1 << 26  # of keys and values gathered at a time, of so many rows as fit, or one


class TorchBlock(DrafterDecoder):
    """See `DrafterDecoder`. Cache: [n, 2, num_blocks * block_size, kv heads, D]."""

    kind = "torch"

    def __init__(self, policy: Decoder, config: BlockConfig, candidates: Candidates = best_candidates):
        """The policy's tables are read from `policy` at every call. `candidates` may overwrite its logits. Raises
        BackendError for a decoder that returns other layers.
        """
        config.check_states(policy.aux_layers)
        self.policy, self.config, self.candidates = policy, config, candidates
        self.device, self.dtype = policy.device, policy.dtype
        self.model = BlockModel(config).to(policy.device, policy.dtype).requires_grad_(False)
        attentions = [layer.self_attn for layer in self.model.blocks]
        projections = [p for a in attentions for p in (a.k_proj, a.v_proj)]
        self._kv = joined([p.weight for p in projections])  # of all layers: one product feeds them
        self._kv_bias = joined([p.bias for p in projections]) if config.layer.qkv_bias else None
        self._gate_up = [joined([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]) for layer in self.model.blocks]
        # Rows of the policy's LM head, in place since graphs keep the address, and the version that they are of.
        self._head_rows: Tensor | None = None
        self._head_version: int | None = None
        if config.reduced:
            shape = config.draft_vocab_size, config.policy.hidden_size
            self._head_rows = torch.empty(shape, dtype=policy.dtype, device=policy.device)
        self._whole_head: Tensor | None = None  # of a decoder that does not compute logits of other states
        self.run_step: RunStep = lambda _key, step: step()
        self._loaded = False

    def use_graphs(self, run_step: RunStep) -> None:
        """From now on steps run by `run_step(key, step)` (`GraphCache.run`). Mutates."""
        self.run_step = run_step

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Zeroed; allocated at once."""
        layer = self.config.layer
        shape = (self.config.block_layers, 2, num_blocks * block_size, layer.num_kv_heads, layer.head_dim)
        return KVCache(num_blocks, block_size, torch.zeros(shape, dtype=self.dtype, device=self.device))

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block over all layers."""
        row = self.config.layer.num_kv_heads * self.config.layer.head_dim * self.dtype.itemsize
        return self.config.block_layers * 2 * block_size * row

    def copy_blocks(self, kv: KVCache, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copies block src[i] to dst[i] in every layer, in order of i."""
        blocks = kv.data.unflatten(2, (-1, kv.block_size))
        for a, b in zip(src, dst, strict=True):
            blocks[:, :, b] = blocks[:, :, a]

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """See `DrafterDecoder.load_weights`."""
        self.model.load_full(named)
        self._loaded, self._head_version = True, None

    def refresh_head(self) -> None:
        """Reads the policy's LM head again after a weight sync has replaced it, where the drafter keeps rows of it or
        a copy. Raises BackendError before all weights are loaded. Collective with tensor parallelism.
        """
        if not self._loaded:
            raise BackendError("the drafter is used before its weights were loaded")
        if self._head_version == self.policy.head_version:
            return
        self._head_version = self.policy.head_version
        if self._head_rows is not None:
            ids = self.model.token_ids()
            assert ids is not None
            torch.index_select(self.policy.lookup_tables()[1], 0, ids, out=self._head_rows)
        elif not isinstance(self.policy, TorchDecoder):
            self._whole_head = self.policy.lookup_tables()[1]

    @torch.inference_mode()
    def feed(self, pairs: Pairs, pages: Tensor, kv: KVCache) -> None:
        """See `DrafterDecoder.feed`. Raises BackendError before weights were loaded."""
        if not self._loaded:
            raise BackendError("the drafter is used before its weights were loaded")
        arrays = (pairs.positions - 1, pairs.state_slots)
        positions, slots = upload(np.stack(arrays), self.device).long()
        features = self.model.features(pages[slots])
        rope = self.model.rope(positions, int(pairs.positions.max(initial=0)) + 1)
        parts = linear(features, self._kv, self._kv_bias).chunk(self.config.block_layers, dim=-1)
        for layer, cache, part in zip(self.model.blocks, kv.data, parts, strict=True):
            cache[0][slots], cache[1][slots] = self._split(layer, part, rope)

    def _split(self, layer: BlockLayer, kv: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, normed and rotated, and values [T, kv heads, D] of a layer's product [T, 2 kv heads D]."""
        shape = self.config.layer
        k, v = kv.unflatten(-1, (-1, shape.head_dim)).chunk(2, dim=1)
        if shape.qk_norm:
            k = rms_norm(k, layer.self_attn.k_norm.weight, shape.rms_norm_eps)
        return rotate(k, rope), v

    def row_drafter(self, kv: KVCache, rows: DraftingRows, pages: Tensor, catch_up: int) -> BlockRowDrafter:
        """See `DrafterDecoder.row_drafter`."""
        return BlockRowDrafter(self, kv, rows, pages, catch_up)

    # -- the step

    def fill(self, tokens: Tensor, positions: Tensor, visible: Tensor, slots: Tensor, kv: KVCache) -> Tensor:
        """Outputs [P, N, H] of blocks at anchors `tokens` [P] at `positions` [P], which see the cached positions where
        `visible` bool [P, L] holds, in `slots` [P, L]. No value comes to the host.
        """
        config, model, (rows, size) = self.config, self.model, (len(tokens), self.config.block_size)
        places = positions[:, None] + torch.arange(size, device=positions.device)
        rope = model.rope(places.flatten())
        at = torch.arange(visible.shape[1], device=positions.device)
        seen = {0: visible[:, None]}  # by window, [P, 1 or S, L]
        seen |= {w: visible[:, None] & (at > places[..., None] - w) for w in set(config.windows) - {0}}
        x = self.policy.embed(model.block_tokens(tokens))
        width = len(self._kv) // config.block_layers
        biases = (None,) * config.block_layers if self._kv_bias is None else self._kv_bias.split(width)
        for layer, cache, weight, bias, gate_up, window in zip(
            model.blocks, kv.data, self._kv.split(width), biases, self._gate_up, config.layer_windows, strict=True
        ):
            y, kernel = model.enter_attention(layer, x)
            own = self._split(layer, linear(y, weight, bias), rope)
            attended = _attend(model.queries(layer, y, rope), own, cache, slots, seen[window])
            x = model.leave(x, layer.self_attn.o_proj(attended.flatten(1)), kernel)
            y, kernel = model.enter_mlp(layer, x)
            gate, up = linear(y, gate_up).chunk(2, dim=-1)
            x = model.leave(x, layer.mlp.down_proj(silu(gate) * up), kernel)
        return model.final(x).view(rows, size, -1)[:, config.first_slot :]

    def logits(self, outputs: Tensor) -> Tensor:
        """Float32 [T, Vd] of outputs [T, H], without what the token before adds."""
        head = self._whole_head if self._head_rows is None else self._head_rows
        if head is not None:
            return linear(outputs, head).float()
        assert isinstance(self.policy, TorchDecoder)
        return self.policy.logits(outputs)  # through the policy's LM head, which may be sharded


def _attend(q: Tensor, own: tuple[Tensor, Tensor], cache: Tensor, slots: Tensor, visible: Tensor) -> Tensor:
    """q [P S, Hq, D] over the cache's rows `slots` [P, L] that are `visible` [P, 1 or S, L], and all of its block's
    `own` keys and values [P S, Hkv, D] -> like q.
    """
    rows, long = slots.shape
    each = 4 * long * cache[0, 0].numel() * cache.element_size()  # gathered, then joined
    shared, done = visible.new_ones(*visible.shape[:2], len(q) // rows), []
    mask = torch.cat([visible, shared], dim=2)[:, None]  # [P, 1, 1 or S, L + S]
    parts = (t.unflatten(0, (rows, -1)).transpose(1, 2) for t in (q, *own))  # [P, heads, S, D]
    size = max(1, _GATHERED_BYTES // max(1, each))
    for query, k, v, at, seen in zip(*(t.split(size) for t in (*parts, slots, mask)), strict=True):
        keys, values = (torch.cat([gather_heads(c, at), t], dim=2) for c, t in zip(cache, (k, v), strict=True))
        done.append(scaled_dot_product_attention(query, keys, values, attn_mask=seen, enable_gqa=True))
    return torch.cat(done).transpose(1, 2).reshape(q.shape)


class _Buffers:
    """Inputs and outputs of the step of P rows. The tensors stay in place: captured graphs keep their addresses."""

    def __init__(self, rows: int, max_blocks: int, drafter: TorchBlock):
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=drafter.device)

        self.num_candidates = min(2, drafter.config.draft_vocab_size)  # the second gives the gap
        # Set by one copy: token, position and first visible position of the anchor, bits of the temperature (float64),
        # noise keys of the drafted tokens, blocks.
        self.inputs = zeros(4 + drafter.config.num_drafted + max_blocks, rows)
        self.best = zeros(drafter.config.num_drafted, 2, rows, self.num_candidates, dtype=torch.float64)  # written


class BlockRowDrafter(RowDrafter):
    """See `RowDrafter`."""

    def __init__(self, drafter: TorchBlock, kv: KVCache, rows: DraftingRows, pages: Tensor, catch_up: int):
        self._drafter, self._rows, self._catch_up_limit = drafter, rows, catch_up
        self.point_at(kv, pages)
        self._size = kv.block_size
        self._most, self._max_blocks = rows.block_tables.shape
        self._buffers = _Buffers(self._most, self._max_blocks, drafter)
        self._has_fixed_width = isinstance(drafter.policy, TorchDecoder) and drafter.policy.paged is not None
        reserved = self._max_blocks * self._size + drafter.config.block_size
        drafter.model.reserve_positions(reserved, drafter.device)

    def steps(self) -> list[tuple[Hashable, Callable[[], object]]]:
        """Every static step with its key, the largest first. Sets the inputs to padding."""
        self._buffers.inputs.zero_()
        return [self._static(batch, self._max_blocks) for batch in step_batches(self._most)]

    @torch.inference_mode()
    def draft(self, wanted: np.ndarray, rates: np.ndarray, min_acceptance: float) -> Draft:
        """See `RowDrafter.draft`. A draft has as many tokens as a block gives, at most."""
        rows, active = self._rows, np.flatnonzero(wanted > 0)
        recorder = DraftRecorder(len(wanted), rates, min_acceptance)
        drafter, most = self._drafter, self._drafter.config.num_drafted
        wanted = np.minimum(wanted[active], recorder.reachable(most))
        if not len(active) or not wanted.any():
            return recorder.result()
        drafter.refresh_head()
        if (pairs := missing_pairs(rows, active, self._catch_up_limit, self._size)) is not None:
            drafter.feed(pairs, self._pages, self._kv)
        batch, blocks = self._begin(active)
        drafter.run_step(*self._static(batch, blocks))
        results = self._buffers.best[:, :, :batch].cpu().numpy()  # the draft's one wait for the device
        at = np.arange(len(active))  # of the drafts that go on
        for number, (scores, candidates) in enumerate(results[: int(wanted.max())]):
            best, score = candidates[at].astype(np.int32), scores[at].astype(np.float32)
            at = at[recorder.record(number, active[at], best, score, wanted[at] > number + 1)]
            if not len(at):
                break
        return recorder.result()

    def _begin(self, active: np.ndarray) -> tuple[int, int]:
        """Uploads the inputs of blocks behind rows `active` [A] in one copy; returns the padded number of rows and the
        number of blocks of their tables. Padding sees no cached position.
        """
        rows, count, drafted = self._rows, len(active), self._drafter.config.num_drafted
        position, slot = rows.positions[active], rows.slot[active]
        batch = min(1 << (count - 1).bit_length(), self._most)
        # Captured graphs have one shape; without them only blocks that hold something are gathered.
        blocks = self._max_blocks if self._has_fixed_width else -(-int(position.max()) // self._size)
        host = np.zeros((4 + drafted + blocks, batch), np.int64)
        host[0, :count] = rows.outputs[slot, rows.output_len[active] - 1]
        host[1, :count] = position
        host[2, :count] = rows.first[slot] - 1  # the pair of a position has the feature of the one before
        host[3, :count] = rows.temperature[active].astype(np.float64).view(np.int64)
        for k in range(drafted):
            host[4 + k, :count] = row_keys(rows.keys[active], rows.output_len[active] + k).view(np.int64)
        host[4 + drafted :, :count] = rows.block_tables[active, :blocks].T
        self._buffers.inputs[: len(host), :batch] = upload(host, self._drafter.device)
        return batch, blocks

    def _static(self, batch: int, blocks: int) -> tuple[Hashable, Callable[[], object]]:
        """The step of so many padded rows, with its key: `blocks` is the same wherever there are graphs."""
        return ("drafter", batch), partial(self._compute, batch, blocks)

    def _compute(self, batch: int, blocks: int) -> None:
        """The step: reads and writes buffers only; running it again gives the same."""
        drafter, drafted = self._drafter, self._drafter.config.num_drafted
        inputs = self._buffers.inputs[: 4 + drafted + blocks, :batch]
        tokens, positions, first = inputs[:3]
        temperature = inputs[3].contiguous().view(torch.float64).float()
        keys, tables = inputs[4 : 4 + drafted], inputs[4 + drafted :].T
        slots = table_slots(tables, blocks * self._size, self._size)
        at = torch.arange(blocks * self._size, device=slots.device)
        visible = (at < positions[:, None]) & (at >= first[:, None])
        outputs = drafter.fill(tokens, positions, visible, slots, self._kv)
        base = drafter.logits(outputs.flatten(0, 1)).view(batch, drafted, -1)
        model, count, ids = drafter.model, self._buffers.num_candidates, drafter.model.token_ids()
        selector = model.candidate_selector
        if selector is not None:
            base, few = base.topk(NUM_CANDIDATES)
        for k in range(drafted):
            logits = base[:, k]
            if model.markov_head is not None:
                logits = logits + model.markov_head.markov_w2(model.markov_head.markov_w1(tokens)).float()
            if selector is not None:
                ids = few[:, k]
                logits = logits + selector.scores(selector.context(outputs[:, k], tokens), ids)
            given = keys[k], temperature, count
            if drafter.candidates is best_candidates or selector is not None:
                best, chosen = best_candidates(logits, *given, ids)
            else:
                best, chosen = drafter.candidates(model.spread(logits.contiguous()), *given)
            self._buffers.best[k, 0, :batch].copy_(best)
            self._buffers.best[k, 1, :batch].copy_(chosen)
            tokens = chosen[:, 0].long()
