"""`TorchEagle`: a drafter over pairs in rollouts of the PyTorch decoder, a `PairModel` over a paged cache of one layer.

One drafted position of all chains is one step, fed with the best candidates of the step before:

    host: positions, slots, noise keys of all steps --> buffers --step--step--step--> candidates of all steps --> host

Steps that no chain can reach are not run.

Legend: T pairs, A chains that were begun, P the padded number of chains, N steps, M blocks of the longest context,
H hidden size, Vd the drafter's vocabulary, C candidates looked at.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from megatron_tlt.drafters.decoder import DraftingRows
from megatron_tlt.drafters.eagle.model import PairModel
from megatron_tlt.drafters.torch_decoder import DraftInputs, TorchDrafter, TorchRowDrafter
from megatron_tlt.models.decoders.base import KVCache
from megatron_tlt.models.decoders.inputs import DecoderInput
from megatron_tlt.models.decoders.torch.attention import AttentionPlan, StaticPlan
from megatron_tlt.models.decoders.torch.decoder import TorchDecoder
from megatron_tlt.models.decoders.torch.layers import joined
from megatron_tlt.models.decoders.torch.paged import PagedPlan


class TorchEagle(TorchDrafter):
    """Cache: [2, (num_blocks + 1) * block_size, kv heads, D]; the last block is scratch."""

    policy: TorchDecoder
    model: PairModel
    scratch_blocks = 1

    def __init__(self, policy: TorchDecoder, model: PairModel):
        super().__init__(policy, model, (2,))
        attention, mlp = self.model.block.self_attn, self.model.block.mlp
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._qkv = joined([part.weight for part in parts])
        self._qkv_bias = joined([part.bias for part in parts]) if model.config.layer.qkv_bias else None
        self._gate_up = joined([mlp.gate_proj.weight, mlp.up_proj.weight])

    def _cache(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, states: Tensor, pages: Tensor, kv: KVCache
    ) -> None:
        x = self.model.join(self.policy.embed(tokens), self.model.previous(pages[states]))
        kv.data[0][slots], kv.data[1][slots] = self.model.keys_values(x, self.model.rope(positions))

    def row_drafter(self, kv: KVCache, rows: DraftingRows, pages: Tensor) -> EagleRowDrafter:
        return EagleRowDrafter(self, kv, rows, pages)

    def step(self, fed: DecoderInput, hidden: Tensor, first_visible: Tensor, kv: KVCache) -> tuple[Tensor, Tensor]:
        """One pair of each of P chains, whose `previous` is `hidden` [P, H]: logits float32 [P, Vd] and outputs [P, H].

        No value comes to the host. Mutates the cache.
        """
        layer, ops, eps = self.model.block, self.ops, self.config.layer.rms_norm_eps
        rope, norms = self.model.rope(fed.positions), None
        if self.config.layer.qk_norm:
            norms = layer.self_attn.q_norm.weight, layer.self_attn.k_norm.weight, eps
        x = self.model.join(self.policy.embed(fed.token_ids), hidden)
        qkv = linear(x, self._qkv, self._qkv_bias)
        q = ops.rotate_into(qkv, norms, rope, fed.slot_mapping, kv.data)
        attended = self._plan(fed, first_visible, kv.block_size).attend(q, kv.data[0], kv.data[1])
        part = linear(attended.flatten(1), layer.self_attn.o_proj.weight)
        residual = self.model.residual(x, hidden)
        x, h = ops.add_norm(residual, part, layer.post_attention_layernorm.weight, eps)
        out = x + linear(ops.gated_silu(linear(h, self._gate_up)), layer.mlp.down_proj.weight)
        return self.logits(out) if self.model.imitates_states else self.model.logits(out).float(), out

    def _plan(self, fed: DecoderInput, first_visible: Tensor, block_size: int) -> AttentionPlan:
        kv_heads = self.config.layer.num_kv_heads
        group = self.config.layer.num_heads // kv_heads
        if self.policy.paged is None:
            return StaticPlan(fed, block_size, 1, first_visible)
        return PagedPlan(self.policy.paged, fed, block_size, (kv_heads, group), 1, first_visible)


class EagleRowDrafter(TorchRowDrafter):
    """Chains, one step a position. The buffers stay in place: captured graphs keep their addresses."""

    _drafter: TorchEagle
    steps_cache = 1

    def __init__(self, eagle: TorchEagle, kv: KVCache, rows: DraftingRows, pages: Tensor):
        super().__init__(eagle, kv, rows, pages)
        chains, hidden_size = self._most, eagle.config.policy.hidden_size
        self._tokens, self._first_visible = self._zeros(chains), self._zeros(chains)
        self._places = self._zeros(3, chains)  # set by one copy: position, slot and noise key
        self._temperature = self._zeros(chains, dtype=torch.float32)
        self._hidden = self._zeros(chains, hidden_size, dtype=eagle.dtype)  # read: the state of the position before
        self._next_hidden = torch.zeros_like(self._hidden)  # written: the chain's output
        # Written: scores, candidates.
        self._best = self._zeros(2, chains, self._num_candidates, dtype=torch.float64)
        eagle.model.reserve_positions(self._max_blocks * self._size, eagle.device)

    def _pad(self) -> None:
        """Chains that only write to scratch."""
        self._tokens.zero_()
        self._places.zero_()
        self._places[1].fill_(self._kv.num_blocks * self._size)
        self._first_visible.fill_(1)
        self._tables.fill_(self._kv.num_blocks)

    def _starting(self, rows: np.ndarray) -> np.ndarray:
        """Those whose last pair is not cached."""
        fresh: np.ndarray = self._rows.synced[self._rows.slot[rows]] < self._rows.positions[rows]
        return rows[fresh]

    def _run(self, active: np.ndarray, wanted: np.ndarray) -> Tensor:
        steps, length = int(wanted.max()), int((self._rows.positions[active] + wanted).max())
        array, blocks = self._upload(active, wanted, steps, length)
        inputs, batch = DraftInputs.of(array, steps), array.shape[1]
        self._next_hidden[:batch] = self._drafter.model.previous(self._pages[inputs.state_slots])
        self._temperature[:batch] = inputs.temperature
        self._tokens[:batch] = inputs.tokens
        self._first_visible[:batch] = inputs.first_visible
        found: list[Tensor] = []  # of each step: scores and candidates, best first, float64 [2, P, C]
        for place in inputs.places:
            self._places[:, :batch] = place
            if found:
                self._tokens[:batch] = found[-1][1, :, 0]
            self._hidden[:batch] = self._next_hidden[:batch]
            self._drafter.run_step(*self._static(batch, blocks))
            found.append(self._best[:, :batch].clone())
            if (tp := self._drafter.policy.tp) is not None:
                tp.broadcast(found[-1])  # all ranks go on with the same tokens
        return torch.stack(found)

    def _compute(self, batch: int, blocks: int) -> None:
        starts = torch.arange(batch + 1, device=self._tokens.device)
        positions, slots, keys = self._places[:, :batch]
        fed = DecoderInput(
            token_ids=self._tokens[:batch],
            positions=positions,
            slot_mapping=slots,
            query_start=starts,
            context_lens=positions + 1,
            block_tables=self._tables[:batch, :blocks],
            logit_rows=starts[:-1],
        )
        drafter, first = self._drafter, self._first_visible[:batch]
        logits, hidden = drafter.step(fed, self._hidden[:batch], first, self._kv)
        sampling = keys, self._temperature[:batch], self._num_candidates
        best, chosen = drafter.ops.best_candidates(logits, *sampling, drafter.model.token_ids())
        self._next_hidden[:batch].copy_(hidden)
        self._best[0, :batch].copy_(best)
        self._best[1, :batch].copy_(chosen)
