"""`TorchDecoder`: the rollout decoder in plain PyTorch, for any device, and the yardstick for the native one.

Unlike the native decoder its results may depend in the last bits on the other rows of a batch: BLAS picks kernels by
shape. With `invariant` they do not: Triton's kernels have one form for all shapes (`kernels.layers.INVARIANT`,
`PagedPlan`); without them a batch goes through the model in tiles of one shape (`invariant.py`). `forward_static` is
the same model for CUDA graphs: no value comes to the host.

Legend: T packed rows, R wanted rows, S sequences, H hidden size, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.errors import BackendError
from megatron_tlt.models.decoders.base import (
    KVCache,
    NamedTensors,
    Shard,
    WeightLedger,
    empty_routed_experts,
    split_name,
)
from megatron_tlt.models.decoders.inputs import DecoderInput, DecoderOutput
from megatron_tlt.models.decoders.torch.attention import AttentionPlan, RaggedPlan, StaticPlan
from megatron_tlt.models.decoders.torch.experts import empty_experts, mix_alike
from megatron_tlt.models.decoders.torch.invariant import (
    TILE,
    TilePlan,
    by_tiles,
    check_rows_alike,
    row_tiles,
    rowwise,
)
from megatron_tlt.models.decoders.torch.layers import PLAIN, HeadNorms, LayerOps, rope_table
from megatron_tlt.models.decoders.torch.paged import PagedPlan, PagedRun
from megatron_tlt.models.hf.config import ModelConfig

_QKV, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


class TorchDecoder:
    """A `base.Decoder` in PyTorch. Cache layout: [L, 2, (num_blocks + 1) * block_size, kv heads, D].

    The block behind the last one is scratch: padding rows write there, and no block table of a request names it.
    """

    kind = "torch"

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        tp: TensorParallel | None = None,
        invariant: bool = False,
        paged: PagedRun | None = None,
        aux_layers: tuple[int, ...] = (),
        ops: LayerOps = PLAIN,
    ):
        """`paged` reads the cache in place (`paged.py`); without it every step gathers keys and values.

        `ops`: operations of layers, with `invariant` and `paged` those that are; `aux_layers`: see `base.Decoder`.
        """
        self.config, self.device, self.dtype = config, torch.device(device), dtype
        self.invariant, self.paged, self.aux_layers = invariant, paged, aux_layers
        self._in_tiles = invariant and paged is None
        self.state_size = (len(aux_layers) + 1) * config.hidden_size
        self.ops = ops
        self._checked = False  # whether equal rows came out equal on this machine
        self.tp = tp if tp is not None and tp.size > 1 else None
        self._shard = Shard(config, tp.rank if tp else 0, tp.size if tp else 1)
        self._ledger = WeightLedger(config)
        self.head_version = 0
        self._rope = rope_table(config, min(config.max_position_embeddings, 4096), self.device)
        self._allocate()

    def _allocate(self) -> None:
        c, s = self.config, self._shard
        d = c.head_dim

        def empty(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=self.dtype, device=self.device)

        self._qkv_sizes = [s.heads * d, s.kv_heads * d, s.kv_heads * d]
        self._embed = empty(c.vocab_size, c.hidden_size)
        self._final_norm = empty(c.hidden_size)
        shared = c.tie_word_embeddings and s.size == 1
        self._head = self._embed if shared else empty(s.vocab, c.hidden_size)
        self._layers: list[dict[str, Tensor]] = [
            (
                empty_experts(c, s, self._embed)
                if index in c.moe_layers
                else {"gate_up": empty(2 * s.inter, c.hidden_size), "down_proj": empty(c.hidden_size, s.inter)}
            )
            | {
                "qkv": empty(sum(self._qkv_sizes), c.hidden_size),
                "o_proj": empty(c.hidden_size, s.heads * d),
                "input_layernorm": empty(c.hidden_size),
                "post_attention_layernorm": empty(c.hidden_size),
            }
            | ({"qkv_bias": empty(sum(self._qkv_sizes))} if c.qkv_bias else {})
            | ({"q_norm": empty(d), "k_norm": empty(d)} if c.qk_norm else {})
            for index in range(c.num_layers)
        ]

    def load_weights(self, named: NamedTensors, partial: bool = False) -> None:
        with torch.no_grad():
            for name, tensor in self._ledger.check(named, partial):
                self._load(name, tensor)

    def _load(self, name: str, tensor: Tensor) -> None:
        index, part, kind = split_name(name)
        if index is None:
            if part == "norm":
                self._final_norm.copy_(tensor)
            if part == "embed_tokens":
                self._embed.copy_(tensor)
            if part == "lm_head" or (part == "embed_tokens" and self.config.tie_word_embeddings):
                self.head_version += 1
                rows = self._shard.slice("lm_head", tensor)
                self._head[: rows.shape[0]].copy_(rows)
            return
        layer = self._layers[index]
        if part == "experts":
            source = self._shard.slice_experts(kind, tensor)
            layer["experts_gate_up" if kind == "gate_up_proj" else "experts_down"].view(source.shape).copy_(source)
            return
        source, part = self._shard.slice(part, tensor), part.removeprefix("shared.")
        if part in _QKV:
            target = layer["qkv" if kind == "weight" else "qkv_bias"]
            target.split(self._qkv_sizes)[_QKV.index(part)].copy_(source)
        elif part in _GATE_UP:
            layer["gate_up"].chunk(2)[_GATE_UP.index(part)].copy_(source)
        else:
            layer[part].copy_(source)

    def lookup_tables(self) -> tuple[Tensor, Tensor]:
        """Both tables [V, H]; gathers the head of several ranks, unless it is the embedding."""
        if self.config.tie_word_embeddings:
            return self._embed, self._embed
        if self.tp is None:
            return self._embed, self._head
        return self._embed, self.tp.all_gather(self._head).flatten(0, 1)[: self.config.vocab_size]

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Zeroed; allocated at once, one scratch block included."""
        slots = (num_blocks + 1) * block_size
        shape = (self.config.num_layers, 2, slots, self._shard.kv_heads, self.config.head_dim)
        return KVCache(num_blocks, block_size, torch.zeros(shape, dtype=self.dtype, device=self.device))

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block over all layers."""
        row = self._shard.kv_heads * self.config.head_dim * self.dtype.itemsize
        return self.config.num_layers * 2 * block_size * row

    def copy_blocks(self, kv: KVCache, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copies block src[i] to dst[i] in every layer, in order of i."""
        blocks = kv.data.unflatten(2, (-1, kv.block_size))
        for a, b in zip(src, dst, strict=True):
            blocks[:, :, b] = blocks[:, :, a]

    def reserve_positions(self, count: int) -> None:
        """Makes the rotary table long enough for `count` positions; CUDA graphs keep its address."""
        if count > self._rope.shape[0]:
            self._rope = rope_table(self.config, count, self.device)

    @torch.inference_mode()
    def forward(self, batch: DecoderInput, kv: KVCache) -> DecoderOutput:
        """Raises BackendError before all weights were loaded."""
        self._require_weights()
        longest = max(batch.context_lens.tolist()) if batch.lengths is None else batch.lengths.longest
        if longest > self._rope.shape[0]:
            self.reserve_positions(2 * longest)
        chosen: list[Tensor] = []
        if self._in_tiles:
            states = self._forward_tiles(batch, kv, chosen)
        else:
            plan = self._plan(batch, kv.block_size)
            fed = (batch.token_ids.long(), batch.positions.long(), batch.slot_mapping.long())
            states = self._layers_forward(*fed, kv, plan, chosen)
        wanted = batch.logit_rows.long()
        states[-1] = self._norm_final(states[-1])
        out = DecoderOutput(self.logits(states[-1][wanted]), _joined(states) if batch.all_hidden else None)
        if batch.all_routed_experts:
            ids = torch.cat(chosen, -1)
            out.routed_experts = empty_routed_experts(len(ids), self.config, self.device).copy_(ids)
        return out

    @torch.inference_mode()
    def forward_static(
        self, batch: DecoderInput, kv: KVCache, rows_each: int, into: DecoderOutput | None = None
    ) -> DecoderOutput:
        """S sequences of exactly `rows_each` rows; logits and hidden states of all of them (`logit_rows` is not read).

        No value comes to the host and every shape follows from the input's, so a CUDA graph may capture the call.
        Padding: rows that write to the scratch block, sequences whose table names it. Call `reserve_positions` first.
        With `into` the outputs are written there, in the compute type. Weights need not be there: graphs are captured
        before they come. Raises BackendError for a decoder that computes in tiles.
        """
        if self._in_tiles:
            raise BackendError(
                "invariant numerics without Triton have no static forward: their calls depend on context lengths"
            )
        plan = self._plan(batch, kv.block_size, rows_each)
        chosen: list[Tensor] = []
        fed = (batch.token_ids.long(), batch.positions.long(), batch.slot_mapping.long())
        states = self._layers_forward(*fed, kv, plan, chosen)
        states[-1] = hidden = self._norm_final(states[-1])
        if into is None:
            return DecoderOutput(self.logits(hidden), _joined(states))
        if self.tp is None:
            self.ops.product(hidden, self._head, out=into.logits)
        else:
            local = self._local_logits(hidden)
            into.logits.copy_(self._shard.gather_logits(self.tp, local, self.config.vocab_size))
        assert into.hidden is not None
        torch.cat(states, dim=-1, out=into.hidden)
        if into.routed_experts is not None:
            into.routed_experts.copy_(torch.cat(chosen, -1))
        return into

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._embed[token_ids]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits float32 [R, V] of final hidden states [R, H], the whole vocabulary on every tensor-parallel rank."""
        local = by_tiles(self._local_logits, hidden) if self._in_tiles else self._local_logits(hidden)
        return self._shard.gather_logits(self.tp, local, self.config.vocab_size).float()

    def _plan(self, batch: DecoderInput, block_size: int, rows_each: int | None = None) -> AttentionPlan:
        """The batch's attention; with `rows_each` that of `forward_static`."""
        kv_heads = self._shard.kv_heads
        heads = (kv_heads, self._shard.heads // kv_heads)
        if self.paged is not None:
            return PagedPlan(self.paged, batch, block_size, heads, rows_each, is_invariant=self.invariant)
        if rows_each is None:
            return RaggedPlan(batch, block_size)
        return StaticPlan(batch, block_size, rows_each)

    def _require_weights(self) -> None:
        if not self._ledger.complete:
            raise BackendError("forward before all weights were loaded")

    def _forward_tiles(self, batch: DecoderInput, kv: KVCache, chosen: list[Tensor]) -> list[Tensor]:
        """`_layers_forward` tile by tile: rows only attend to earlier tiles and their own."""
        if not self._checked:
            self._check_rows_alike()
            self._checked = True
        done, routed_experts = [], []
        for t in row_tiles(batch, kv.block_size, kv.num_blocks * kv.block_size):
            of_tile: list[Tensor] = []
            states = self._layers_forward(t.token_ids, t.positions, t.slots, kv, t.plan, of_tile)
            done.append([state[: t.used] for state in states])
            routed_experts.append([ids[: t.used] for ids in of_tile])
        chosen += [torch.cat(parts) for parts in zip(*routed_experts, strict=True)]
        return [torch.cat(parts) for parts in zip(*done, strict=True)]

    def _layers_forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        kv: KVCache,
        plan: AttentionPlan,
        chosen: list[Tensor],
    ) -> list[Tensor]:
        """The residual stream behind each of `aux_layers` and behind the last layer, [T, H] each; the experts [T, k] of
        each layer that has some are appended to `chosen`.
        """
        rope, x = self._rope[positions], self._embed[token_ids]
        eps, add_norm = self.config.rms_norm_eps, self.ops.add_norm
        part: Tensor | None = None  # of the residual stream, not added yet
        states: list[Tensor] = []
        for index, (layer, cache) in enumerate(zip(self._layers, kv.data, strict=True)):
            x, h = add_norm(x, part, layer["input_layernorm"], eps)
            if index - 1 in self.aux_layers:  # its output is whole from here on
                states.append(x)
            part = self._attention(layer, h, cache, rope, slots, plan)
            x, h = add_norm(x, part, layer["post_attention_layernorm"], eps)
            part = self._mlp(layer, h) if "gate" not in layer else self._experts(layer, h, chosen)
            part = self._reduce(part)
        return [*states, x if part is None else x + part]

    def _attention(
        self,
        layer: dict[str, Tensor],
        h: Tensor,
        cache: Tensor,
        rope: Tensor,
        slots: Tensor,
        plan: AttentionPlan,
    ) -> Tensor:
        norms: HeadNorms | None = None
        if self.config.qk_norm:
            norms = layer["q_norm"], layer["k_norm"], self.config.rms_norm_eps
        qkv = self.ops.product(h, layer["qkv"], layer.get("qkv_bias"))
        q = self.ops.rotate_into(qkv, norms, rope, slots, cache)
        attended = plan.attend(q, cache[0], cache[1])
        return self._reduce(self.ops.product(attended.flatten(1), layer["o_proj"]))

    def _mlp(self, layer: dict[str, Tensor], h: Tensor) -> Tensor:
        product, gate = self.ops.product, self.ops.gated_silu
        both = product(h, layer["gate_up"])
        return product(rowwise(gate, both) if self._in_tiles else gate(both), layer["down_proj"])

    def _experts(self, layer: dict[str, Tensor], h: Tensor, chosen: list[Tensor]) -> Tensor:
        """A layer's experts, and the one that all rows share (Qwen2-MoE)."""
        gates, ids = self.ops.route(h, layer["gate"], self.config.num_experts_per_tok, self.config.norm_topk_prob)
        chosen.append(ids)
        mix = mix_alike if self._in_tiles else self.ops.mix_experts
        mixed = mix(h, gates, ids, layer["experts_gate_up"], layer["experts_down"])
        if "shared_expert_gate" not in layer:
            return mixed
        return mixed + self.ops.product(h, layer["shared_expert_gate"]).sigmoid() * self._mlp(layer, h)

    def _norm_final(self, x: Tensor) -> Tensor:
        def norm(rows: Tensor) -> Tensor:
            return self.ops.add_norm(rows, None, self._final_norm, self.config.rms_norm_eps)[1]

        return by_tiles(norm, x) if self._in_tiles else norm(x)

    def _local_logits(self, hidden: Tensor) -> Tensor:
        return self.ops.product(hidden, self._head)

    def _reduce(self, part: Tensor) -> Tensor:
        """Sums over the ranks: on CPU in float32, on a GPU in the model's type. On CPU, and with invariant numerics, in
        the order of the ranks.
        """
        if self.tp is None:
            return part
        summed = part.float().contiguous() if part.device.type == "cpu" else part.contiguous()
        self.tp.all_reduce(summed, in_order=self.invariant)
        return summed.to(part.dtype)

    def _check_rows_alike(self) -> None:
        """Sends TILE equal rows through the model. Raises BackendError if they do not come out equal."""
        kv, slots = self.new_kv_cache(1, TILE), torch.arange(TILE, device=self.device)
        token = torch.full_like(slots, self.config.vocab_size // 2)
        plan = TilePlan(list(slots.split(1)))
        states = self._layers_forward(token, torch.zeros_like(slots), slots, kv, plan, [])
        check_rows_alike(self._local_logits(self._norm_final(states[-1])))


def _joined(states: list[Tensor]) -> Tensor:
    """[T, n H] of n tensors [T, H]."""
    return states[0] if len(states) == 1 else torch.cat(states, dim=-1)
