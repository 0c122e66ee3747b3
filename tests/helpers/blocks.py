"""What a block drafter must compute, in a few lines of plain PyTorch, one block at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import silu

from megatron_tlt.config.block_drafters import BlockShape
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.dspark.config import BlockConfig
from megatron_tlt.models.torch.layers import rope_table


def block_config(policy: ModelConfig, vocab: int | None = None, layer: ModelConfig | None = None, **more):
    """A drafter of two layers that reads the outputs of three, of rank 12, whose mask is token 7."""
    sizes = {"layers": 2, "aux_layers": (0, 2, 5), "block_size": 6, "markov_rank": 12, "mask_token_id": 7}
    return BlockConfig.of(policy, BlockShape(**(sizes | {"sample_from_anchor": True} | more)), vocab, layer)


def expected_slots(
    config: BlockConfig, embed: Tensor, drafter: Mapping[str, Tensor], anchor: int, states: Tensor, first: int = 0
) -> Tensor:
    """Outputs [B, H] behind the final norm of the block behind `states` [a, W], whose anchor is token `anchor` at a.

    Positions before `first` are not seen.
    """
    e, layer, place = drafter, config.layer, len(states)
    d, eps = layer.head_dim, layer.rms_norm_eps
    table = rope_table(layer, place + config.block_size)

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * e[f"{name}.weight"]

    def heads(x: Tensor, at: str, name: str, begin: int) -> Tensor:
        y = x @ e[f"{at}.{name}_proj.weight"].T + e.get(f"{at}.{name}_proj.bias", torch.zeros(()))
        y = y.view(len(x), -1, d).transpose(0, 1)
        if name != "v":
            y = norm(y, f"{at}.{name}_norm") if layer.qk_norm else y
            cos, sin = table[begin : begin + len(x)].chunk(2, -1)
            a, b = y.chunk(2, -1)
            y = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        return y

    features = norm(states[first:, : e["fc.weight"].shape[1]] @ e["fc.weight"].T, "hidden_norm")
    x = embed[[anchor] + [config.mask_token_id] * (config.block_size - 1)]
    for j in range(config.block_layers):
        at = f"layers.{j}.self_attn"
        y = norm(x, f"layers.{j}.input_layernorm")
        k, v = (torch.cat([heads(features, at, n, first), heads(y, at, n, place)], 1) for n in "kv")
        group = layer.num_heads // layer.num_kv_heads
        scores = heads(y, at, "q", place) @ k.repeat_interleave(group, 0).transpose(1, 2) / d**0.5
        out = (scores.softmax(-1) @ v.repeat_interleave(group, 0)).transpose(0, 1).reshape(len(x), -1)
        x = x + out @ e[f"{at}.o_proj.weight"].T
        y = norm(x, f"layers.{j}.post_attention_layernorm")
        gate, up = (y @ e[f"layers.{j}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (silu(gate) * up) @ e[f"layers.{j}.mlp.down_proj.weight"].T
    return norm(x, "norm")


def expected_logits(
    config: BlockConfig, head: Tensor, drafter: Mapping[str, Tensor], slots: Tensor, k: int, before: int
) -> Tensor:
    """Logits [V] of drafted position `k` behind token `before`, of `expected_slots`."""
    ids = torch.arange(config.draft_vocab_size) + drafter.get("d2t", torch.zeros(()).long())
    own = head[ids] @ slots[k if config.sample_from_anchor else k + 1]
    if config.markov_rank:
        own = own + drafter["markov_head.markov_w2.weight"] @ drafter["markov_head.markov_w1.weight"][before]
    logits = torch.full((config.policy.vocab_size,), float("-inf"))
    logits[ids] = own
    return logits
