"""`TorchDecoder`: the rollout decoder in plain PyTorch, for any device, and the yardstick for the native one.

Unlike the native decoder its results may depend in the last bits on what shares a batch: BLAS picks
kernels by shape. Legend: T packed rows, R wanted rows, H hidden size, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.errors import BackendError
from megatron_tlt.models.attention import AttentionPlan, paged_attention
from megatron_tlt.models.base import KVCache, NamedTensors, Shard, WeightLedger, split_name
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.inputs import DecoderInput, DecoderOutput
from megatron_tlt.models.layers import gated_silu, rms_norm, rope_table, rotate

_QKV, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


class TorchDecoder:
    """See `base.Decoder`. Cache layout: [L, 2, num_blocks * block_size, kv heads, D]."""

    kind = "torch"

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        tp: TensorParallel | None = None,
    ):
        self.config, self.device, self.dtype = config, torch.device(device), dtype
        self._tp = tp
        self._shard = Shard(config, tp.rank if tp else 0, tp.size if tp else 1)
        self._ledger = WeightLedger(config)
        self._rope = rope_table(config, min(config.max_position_embeddings, 4096), self.device)
        self._allocate()

    def _allocate(self) -> None:
        c, s = self.config, self._shard
        d = c.head_dim

        def empty(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=self.dtype, device=self.device)

        self._qkv_sizes = [s.heads * d, s.kv_heads * d, s.kv_heads * d]
        self._embed, self._final_norm = empty(c.vocab_size, c.hidden_size), empty(c.hidden_size)
        shared = c.tie_word_embeddings and s.size == 1
        self._head = self._embed if shared else empty(s.vocab, c.hidden_size)
        self._layers: list[dict[str, Tensor]] = [
            {
                "qkv": empty(sum(self._qkv_sizes), c.hidden_size),
                "o_proj": empty(c.hidden_size, s.heads * d),
                "gate_up": empty(2 * s.inter, c.hidden_size),
                "down_proj": empty(c.hidden_size, s.inter),
                "input_layernorm": empty(c.hidden_size),
                "post_attention_layernorm": empty(c.hidden_size),
            }
            | ({"qkv_bias": empty(sum(self._qkv_sizes))} if c.qkv_bias else {})
            | ({"q_norm": empty(d), "k_norm": empty(d)} if c.qk_norm else {})
            for _ in range(c.num_layers)
        ]

    def load_weights(self, named: NamedTensors, partial: bool = False) -> None:
        """See `base.Decoder.load_weights`."""
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
                rows = self._shard.slice("lm_head", tensor)
                self._head[: rows.shape[0]].copy_(rows)
            return
        layer, source = self._layers[index], self._shard.slice(part, tensor)
        if part in _QKV:
            target = layer["qkv" if kind == "weight" else "qkv_bias"]
            target.split(self._qkv_sizes)[_QKV.index(part)].copy_(source)
        elif part in _GATE_UP:
            layer["gate_up"].chunk(2)[_GATE_UP.index(part)].copy_(source)
        else:
            layer[part].copy_(source)

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Zeroed; its memory is taken at once."""
        shape = (
            self.config.num_layers,
            2,
            num_blocks * block_size,
            self._shard.kv_heads,
            self.config.head_dim,
        )
        return KVCache(num_blocks, block_size, torch.zeros(shape, dtype=self.dtype, device=self.device))

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block over all layers."""
        row = self._shard.kv_heads * self.config.head_dim * self.dtype.itemsize
        return self.config.num_layers * 2 * block_size * row

    def copy_blocks(self, kv: KVCache, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copies block src[i] to dst[i] in every layer, in order of i."""
        blocks = kv.data.view(*kv.data.shape[:2], kv.num_blocks, kv.block_size, *kv.data.shape[3:])
        for a, b in zip(src, dst, strict=True):
            blocks[:, :, b] = blocks[:, :, a]

    @torch.inference_mode()
    def forward(self, batch: DecoderInput, kv: KVCache) -> DecoderOutput:
        """See `base.Decoder.forward`. Raises BackendError before all weights were loaded."""
        if not self._ledger.complete:
            raise BackendError("forward before all weights were loaded")
        plan = AttentionPlan(batch, kv.block_size)
        longest = max(batch.context_lens.tolist())
        if longest > self._rope.shape[0]:
            self._rope = rope_table(self.config, 2 * longest, self.device)
        rope, slots = self._rope[batch.positions.long()], batch.slot_mapping.long()
        x = self._embed[batch.token_ids.long()]
        for layer, cache in zip(self._layers, kv.data, strict=True):
            h = rms_norm(x, layer["input_layernorm"], self.config.rms_norm_eps)
            x = x + self._attention(layer, h, cache, rope, slots, plan)
            h = rms_norm(x, layer["post_attention_layernorm"], self.config.rms_norm_eps)
            x = x + self._reduce(linear(gated_silu(linear(h, layer["gate_up"])), layer["down_proj"]))
        hidden = rms_norm(x[batch.logit_rows.long()], self._final_norm, self.config.rms_norm_eps)
        local = linear(hidden, self._head).float()
        return DecoderOutput(self._shard.gather_logits(self._tp, local, self.config.vocab_size), hidden)

    def _attention(
        self,
        layer: dict[str, Tensor],
        h: Tensor,
        cache: Tensor,
        rope: Tensor,
        slots: Tensor,
        plan: AttentionPlan,
    ) -> Tensor:
        d, eps = self.config.head_dim, self.config.rms_norm_eps
        q, k, v = (
            t.unflatten(-1, (-1, d))
            for t in linear(h, layer["qkv"], layer.get("qkv_bias")).split(self._qkv_sizes, -1)
        )
        if self.config.qk_norm:
            q, k = rms_norm(q, layer["q_norm"], eps), rms_norm(k, layer["k_norm"], eps)
        cache[0][slots], cache[1][slots] = rotate(k, rope), v
        attended = paged_attention(rotate(q, rope), cache[0], cache[1], plan)
        return self._reduce(linear(attended.flatten(1), layer["o_proj"]))

    def _reduce(self, partial: Tensor) -> Tensor:
        if self._tp is None or self._tp.size == 1:
            return partial
        wide = partial.float().contiguous()
        self._tp.all_reduce(wide)
        return wide.to(partial.dtype)
