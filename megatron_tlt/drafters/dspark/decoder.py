"""`TorchBlock`: a block drafter in rollouts, in PyTorch, beside either of the policy's decoders.

The cache holds keys and values of the features, of all layers, in the slots of the policy's block tables: slot s has
the feature of the token at s. A block's own keys and values live for one forward, so a rejected draft leaves nothing
behind. A pair (token at s, state of s - 1; see `drafters.decoder`) caches the feature of s - 1.

A draft is one step, forward and token loop alike:

    anchors, keys --> block forward --> LM head --> [bias of the token before, noise, best candidate] x N --> host

DFlash 2 takes the 16 largest logits of each slot before the loop, and its selector's scores as the bias.

It costs the same whatever the length of the drafts.

Legend: T pairs, P padded rows, S slots of a block, N drafted tokens of a block, n of them at a time, M blocks of a
table, H hidden size, Vd the drafter's vocabulary, C candidates looked at.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from megatron_tlt.config.block_drafters import LOGITS_AT_ONCE, NUM_CANDIDATES
from megatron_tlt.drafters.decoder import DraftingRows
from megatron_tlt.drafters.dspark.config import BlockConfig
from megatron_tlt.drafters.dspark.model import BlockLayer, BlockModel
from megatron_tlt.drafters.torch_decoder import DraftInputs, TorchDrafter, TorchRowDrafter
from megatron_tlt.models.decoders.base import Decoder, KVCache
from megatron_tlt.models.decoders.inputs import DecoderInput
from megatron_tlt.models.decoders.torch.attention import BlockPlan
from megatron_tlt.models.decoders.torch.decoder import TorchDecoder
from megatron_tlt.models.decoders.torch.layers import HeadNorms, joined
from megatron_tlt.models.decoders.torch.paged import PagedPlan


class TorchBlock(TorchDrafter):
    """Cache: [n, 2, num_blocks * block_size, kv heads, D]."""

    config: BlockConfig
    model: BlockModel

    def __init__(self, policy: Decoder, model: BlockModel):
        config = model.config
        super().__init__(policy, model, (config.block_layers, 2))
        self._paged = policy.paged if isinstance(policy, TorchDecoder) else None
        attentions = [layer.self_attn for layer in self.model.blocks]
        parts = [(a.q_proj, a.k_proj, a.v_proj) for a in attentions]
        self._qkv = [joined([p.weight for p in own]) for own in parts]
        has_bias = config.layer.qkv_bias
        self._qkv_bias = [joined([p.bias for p in own]) if has_bias else None for own in parts]
        self._gate_up = [joined([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]) for layer in self.model.blocks]

    def _cache(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, states: Tensor, pages: Tensor, kv: KVCache
    ) -> None:
        features, rope = self.model.features(pages[states]), self.model.rope(positions - 1)
        q = self.config.layer.num_heads * self.config.layer.head_dim  # features have keys and values only
        for layer, cache, weight, bias in zip(self.model.blocks, kv.data, self._qkv, self._qkv_bias, strict=True):
            both = linear(features, weight[q:], None if bias is None else bias[q:])
            self.ops.rotate_into(both, self._norms(layer), rope, states, cache)

    def _norms(self, layer: BlockLayer) -> HeadNorms | None:
        shape, attention = self.config.layer, layer.self_attn
        return (attention.q_norm.weight, attention.k_norm.weight, shape.rms_norm_eps) if shape.qk_norm else None

    def row_drafter(self, kv: KVCache, rows: DraftingRows, pages: Tensor) -> BlockRowDrafter:
        return BlockRowDrafter(self, kv, rows, pages)

    # -- the step

    def fill(self, tokens: Tensor, positions: Tensor, first_visible: Tensor, tables: Tensor, kv: KVCache) -> Tensor:
        """Outputs [P, N, H] of blocks at anchors `tokens` [P] at `positions` [P], which see the cached positions before
        them from `first_visible` [P] on, by `tables` [P, M]. No value comes to the host.
        """
        config, model, ops, (rows, size) = self.config, self.model, self.ops, (len(tokens), self.config.block_size)
        places = positions[:, None] + torch.arange(size, device=positions.device)
        rope, eps = model.rope(places.flatten()), config.layer.rms_norm_eps
        plan = self._plan(places, first_visible, tables, kv.block_size)
        numbers = torch.arange(len(rope), device=rope.device)
        own = kv.data.new_empty(2, len(rope), *kv.data.shape[-2:])  # keys and values of a layer
        x, part = self.policy.embed(model.block_tokens(tokens)), None
        for layer, cache, qkv, bias, gate_up, window in zip(
            model.blocks, kv.data, self._qkv, self._qkv_bias, self._gate_up, config.layer_windows, strict=True
        ):
            x, y = ops.add_norm(x, part, layer.input_layernorm.weight, eps)
            y, kernel = model.enter(y, layer.attention_conv)
            q = ops.rotate_into(linear(y, qkv, bias), self._norms(layer), rope, numbers, own)
            attended = plan.attend(q, cache[0], cache[1], own, window)
            part = model.leave(layer.self_attn.o_proj(attended.flatten(1)), kernel)
            x, y = ops.add_norm(x, part, layer.post_attention_layernorm.weight, eps)
            y, kernel = model.enter(y, layer.mlp_conv)
            part = model.leave(layer.mlp.down_proj(ops.gated_silu(linear(y, gate_up))), kernel)
        x = ops.add_norm(x, part, model.norm.weight, eps)[1]
        return x.view(rows, size, -1)[:, config.first_slot :]

    def _plan(self, places: Tensor, first_visible: Tensor, tables: Tensor, block_size: int) -> PagedPlan | BlockPlan:
        """Attention of slots at `places` [P, S] over cached positions from `first_visible` [P] on."""
        if self._paged is None:
            return BlockPlan(places, first_visible, tables, block_size)
        layer, (rows, size), flat = self.config.layer, places.shape, places.flatten()
        starts = torch.arange(rows + 1, device=flat.device) * size
        # Slots are rows of the block's own keys and values, in order.
        slots = torch.arange(rows * size, device=flat.device)
        batch = DecoderInput(flat, flat, slots, starts, places[:, -1] + 1, tables, slots)
        heads = layer.num_kv_heads, layer.num_heads // layer.num_kv_heads
        return PagedPlan(self._paged, batch, block_size, heads, size, first_visible)


class BlockRowDrafter(TorchRowDrafter):
    """Blocks, one step a draft. The buffers stay in place: captured graphs keep their addresses."""

    _drafter: TorchBlock

    def __init__(self, drafter: TorchBlock, kv: KVCache, rows: DraftingRows, pages: Tensor):
        super().__init__(drafter, kv, rows, pages)
        self._drafted = drafter.config.num_drafted
        self._inputs = self._zeros(DraftInputs.rows(self._drafted, 0), self._most)
        # Written: scores, candidates.
        self._best = self._zeros(self._drafted, 2, self._most, self._num_candidates, dtype=torch.float64)
        reserved = self._max_blocks * self._size + drafter.config.block_size
        drafter.model.reserve_positions(reserved, drafter.device)

    def _pad(self) -> None:
        """Rows that see no cached position."""
        self._inputs.zero_()
        DraftInputs.of(self._inputs, self._drafted).first_visible.fill_(1)

    def _longest(self, wanted: int) -> int:
        """A draft has as many tokens as a block gives, at most."""
        return self._drafted

    def _run(self, active: np.ndarray, wanted: np.ndarray) -> Tensor:
        length = int(self._rows.positions[active].max())
        array, blocks = self._upload(active, wanted, self._drafted, length)
        self._inputs[:, : array.shape[1]] = array[: len(self._inputs)]
        self._drafter.run_step(*self._static(array.shape[1], blocks))
        return self._best[:, :, : array.shape[1]]

    def _compute(self, batch: int, blocks: int) -> None:
        drafter, drafted = self._drafter, self._drafted
        inputs, tables = DraftInputs.of(self._inputs[:, :batch], drafted), self._tables[:batch, :blocks]
        # The pair of a position has the feature of the one before.
        outputs = drafter.fill(inputs.tokens, inputs.places[0, 0], inputs.first_visible - 1, tables, self._kv)
        tokens, temperature = inputs.tokens, inputs.temperature.float()
        each = max(1, LOGITS_AT_ONCE // (batch * drafter.config.draft_vocab_size))
        parts = (t.split(each) for t in (outputs.transpose(0, 1), inputs.places[:, 2], self._best[:, :, :batch]))
        for some, keys, best in zip(*parts, strict=True):
            tokens = self._choose(some, tokens, keys, temperature, best)

    def _choose(self, outputs: Tensor, tokens: Tensor, keys: Tensor, temperature: Tensor, into: Tensor) -> Tensor:
        """The loop of n positions behind `tokens` [P]: of `outputs` [n, P, H], under noise keys [n, P]. Writes scores
        and candidates `into` [n, 2, P, C]; returns the last position's tokens.
        """
        drafter, model, (count, rows, _) = self._drafter, self._drafter.model, outputs.shape
        base = drafter.logits(outputs.flatten(0, 1)).view(count, rows, -1)
        selector, ids = model.candidate_selector, model.token_ids()
        if selector is not None:
            base, few = base.topk(NUM_CANDIDATES)
        for k in range(count):
            logits, sampling = base[k], (keys[k], temperature, self._num_candidates)
            if model.markov_head is not None:
                logits += model.markov_head.markov_w2(model.markov_head.markov_w1(tokens))
            if selector is not None:
                ids = few[k]
                logits = logits + selector.scores(selector.context(outputs[k], tokens), ids)
            best, chosen = drafter.ops.best_candidates(logits, *sampling, ids)
            into[k, 0].copy_(best)
            into[k, 1].copy_(chosen)
            tokens = chosen[:, 0].long()
        return tokens
