"""What a block drafter must compute, in a few lines of plain PyTorch, one block at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import silu

from megatron_tlt.config.block_drafters import BlockShape
from megatron_tlt.drafters.dspark.config import BlockConfig
from megatron_tlt.models.decoders.torch.layers import rope_table
from megatron_tlt.models.hf.config import ModelConfig


def block_config(policy: ModelConfig, vocab: int | None = None, layer: ModelConfig | None = None, **more):
    """A drafter of two layers that reads the outputs of three, of rank 12, whose mask is token 7."""
    sizes = {"layers": 2, "aux_layers": (0, 2, 5), "block_size": 6, "markov_rank": 12, "mask_token_id": 7}
    return BlockConfig.of(policy, BlockShape(**(sizes | {"sample_from_anchor": True} | more)), vocab, layer)


DFLASH2 = {"sample_from_anchor": False, "markov_rank": 0, "selector_rank": 12, "windows": (9, 0)}


def convolved(x: Tensor, drafter: Mapping[str, Tensor], at: str, side: int, read: Tensor) -> Tensor:
    """DFlash 2's convolution of a block's x [B, H], slot by slot; its kernels follow the sublayer's input `read`."""
    kernels = (read @ drafter[f"{at}.kernel_projection.weight"].T).view(len(x), 2, 2, -1)[:, side]
    base, group = drafter[f"{at}.base_kernel"][side], torch.arange(x.shape[1]) // 16
    out = [(base[0] + kernels[k, 0][group]) * x[k] for k in range(len(x))]
    return torch.stack([y + (base[1] + kernels[k, 1][group]) * x[k - 1] if k else y for k, y in enumerate(out)])


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
        y = read = norm(x, f"layers.{j}.input_layernorm")
        if config.selector_rank:
            y = convolved(read, e, f"layers.{j}.attention_conv", 0, read)
        k, v = (torch.cat([heads(features, at, n, first), heads(y, at, n, place)], 1) for n in "kv")
        group = layer.num_heads // layer.num_kv_heads
        scores = heads(y, at, "q", place) @ k.repeat_interleave(group, 0).transpose(1, 2) / d**0.5
        for i in range(len(x)):
            behind = max(0, place + i - config.layer_windows[j] + 1 - first) if config.layer_windows[j] else 0
            scores[:, i, :behind] = float("-inf")
        out = (scores.softmax(-1) @ v.repeat_interleave(group, 0)).transpose(0, 1).reshape(len(x), -1)
        out = out @ e[f"{at}.o_proj.weight"].T
        x = x + (convolved(out, e, f"layers.{j}.attention_conv", 1, read) if config.selector_rank else out)
        y = read = norm(x, f"layers.{j}.post_attention_layernorm")
        if config.selector_rank:
            y = convolved(read, e, f"layers.{j}.mlp_conv", 0, read)
        gate, up = (y @ e[f"layers.{j}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        out = (silu(gate) * up) @ e[f"layers.{j}.mlp.down_proj.weight"].T
        x = x + (convolved(out, e, f"layers.{j}.mlp_conv", 1, read) if config.selector_rank else out)
    return norm(x, "norm")


def expected_logits(
    config: BlockConfig, head: Tensor, drafter: Mapping[str, Tensor], slots: Tensor, k: int, before: int
) -> Tensor:
    """Logits [V] of drafted position `k` behind token `before`, of `expected_slots`."""
    ids = torch.arange(config.draft_vocab_size) + drafter.get("d2t", torch.zeros(()).long())
    state = slots[k if config.sample_from_anchor else k + 1]
    own = head[ids] @ state
    if config.markov_rank:
        own = own + drafter["markov_head.markov_w2.weight"] @ drafter["markov_head.markov_w1.weight"][before]
    logits = torch.full((config.policy.vocab_size,), float("-inf"))
    if config.selector_rank:
        selector = {name: drafter[f"candidate_selector.{name}_codebook"] for name in ("predecessor", "successor")}
        context = selector["predecessor"][before] * (drafter["candidate_selector.hidden_projection.weight"] @ state)
        for c in own.topk(16).indices.tolist():
            logits[c] = own[c] + context @ selector["successor"][c]
        return logits
    logits[ids] = own
    return logits
