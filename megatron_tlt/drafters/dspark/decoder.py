"""`TorchBlock`: a block drafter in rollouts, in PyTorch, beside either of the policy's decoders.

The cache holds keys and values of the features, of all layers, in the slots of the policy's block tables: slot s has
the feature of the token at s. A block's own keys and values live for one forward, so a rejected draft leaves nothing
behind. A pair (token at s, state of s - 1; see `drafters.decoder`) caches the feature of s - 1.

A draft is one step, forward and token loop alike:

    anchors, keys --> block forward --> LM head --> [bias of the token before, noise, best candidate] x N --> host

DFlash 2 takes the 16 largest logits of each slot before the loop, and its selector's scores as the bias.

It costs the same whatever the length of the drafts.

Legend: T pairs, P padded rows, S slots of a block, N drafted tokens of a block, M blocks of a table, L = M * block
size, H hidden size, Vd the drafter's vocabulary, C candidates looked at, n layers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from megatron_tlt.config.block_drafters import NUM_CANDIDATES
from megatron_tlt.drafters.decoder import DraftingRows
from megatron_tlt.drafters.dspark.config import BlockConfig
from megatron_tlt.drafters.dspark.model import BlockLayer, BlockModel
from megatron_tlt.drafters.torch_decoder import DraftInputs, TorchDrafter, TorchRowDrafter
from megatron_tlt.models.decoders.base import Decoder, KVCache
from megatron_tlt.models.decoders.keyed_noise import Candidates, best_candidates
from megatron_tlt.models.decoders.torch.attention import gather_heads, table_slots
from megatron_tlt.models.decoders.torch.layers import joined, rms_norm, rotate

_GATHERED_BYTES = 1 << 26  # of keys and values gathered at a time, of so many rows as fit, or one


class TorchBlock(TorchDrafter):
    """Cache: [n, 2, num_blocks * block_size, kv heads, D]."""

    config: BlockConfig
    model: BlockModel

    def __init__(self, policy: Decoder, model: BlockModel, candidates: Candidates = best_candidates):
        config = model.config
        super().__init__(policy, model, candidates, (config.block_layers, 2))
        attentions = [layer.self_attn for layer in self.model.blocks]
        projections = [p for a in attentions for p in (a.k_proj, a.v_proj)]
        self._kv = joined([p.weight for p in projections])  # of all layers: one product feeds them
        self._kv_bias = joined([p.bias for p in projections]) if config.layer.qkv_bias else None
        self._gate_up = [joined([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]) for layer in self.model.blocks]

    def _cache(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, states: Tensor, pages: Tensor, kv: KVCache
    ) -> None:
        features, rope = self.model.features(pages[states]), self.model.rope(positions - 1)
        parts = linear(features, self._kv, self._kv_bias).chunk(self.config.block_layers, dim=-1)
        for layer, cache, part in zip(self.model.blocks, kv.data, parts, strict=True):
            cache[0][states], cache[1][states] = self._split(layer, part, rope)

    def _split(self, layer: BlockLayer, kv: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, normed and rotated, and values [T, kv heads, D] of a layer's product [T, 2 kv heads D]."""
        shape = self.config.layer
        k, v = kv.unflatten(-1, (-1, shape.head_dim)).chunk(2, dim=1)
        if shape.qk_norm:
            k = rms_norm(k, layer.self_attn.k_norm.weight, shape.rms_norm_eps)
        return rotate(k, rope), v

    def row_drafter(self, kv: KVCache, rows: DraftingRows, pages: Tensor, catch_up: int) -> BlockRowDrafter:
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


class BlockRowDrafter(TorchRowDrafter):
    """Blocks, one step a draft. The buffers stay in place: captured graphs keep their addresses."""

    _drafter: TorchBlock

    def __init__(self, drafter: TorchBlock, kv: KVCache, rows: DraftingRows, pages: Tensor, catch_up: int):
        super().__init__(drafter, kv, rows, pages, catch_up)
        self._drafted = drafter.config.num_drafted
        self._inputs = self._zeros(DraftInputs.rows(self._drafted, self._max_blocks), self._most)
        # Written: scores, candidates.
        self._best = self._zeros(self._drafted, 2, self._most, self._num_candidates, dtype=torch.float64)
        reserved = self._max_blocks * self._size + drafter.config.block_size
        drafter.model.reserve_positions(reserved, drafter.device)

    def _pad(self) -> None:
        """Rows that see no cached position."""
        self._inputs.zero_()

    def _longest(self, wanted: int) -> int:
        """A draft has as many tokens as a block gives, at most."""
        return self._drafted

    def _run(self, active: np.ndarray, wanted: np.ndarray) -> Tensor:
        length = int(self._rows.positions[active].max())
        array, blocks = self._upload(active, wanted, self._drafted, length)
        self._inputs[: len(array), : array.shape[1]] = array
        self._drafter.run_step(*self._static(array.shape[1], blocks))
        return self._best[:, :, : array.shape[1]]

    def _compute(self, batch: int, blocks: int) -> None:
        drafter, drafted = self._drafter, self._drafted
        inputs = DraftInputs.of(self._inputs[: DraftInputs.rows(drafted, blocks), :batch], drafted)
        tokens, positions, temperature = inputs.tokens, inputs.places[0, 0], inputs.temperature.float()
        slots = table_slots(inputs.block_tables.T, blocks * self._size, self._size)
        at = torch.arange(blocks * self._size, device=slots.device)
        # The pair of a position has the feature of the one before.
        visible = (at < positions[:, None]) & (at >= inputs.first_visible[:, None] - 1)
        outputs = drafter.fill(tokens, positions, visible, slots, self._kv)
        base = drafter.logits(outputs.flatten(0, 1)).view(batch, drafted, -1)
        model, ids = drafter.model, drafter.model.token_ids()
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
            given = inputs.places[k, 2], temperature, self._num_candidates
            if drafter.candidates is best_candidates or selector is not None:
                best, chosen = best_candidates(logits, *given, ids)
            else:
                best, chosen = drafter.candidates(model.spread(logits.contiguous()), *given)
            self._best[k, 0, :batch].copy_(best)
            self._best[k, 1, :batch].copy_(chosen)
            tokens = chosen[:, 0].long()
