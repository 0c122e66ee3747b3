"""The EAGLE drafter's pairs over shuffled blocks, and what it must compute, in a few lines of plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

from megatron_tlt.models.base import KVCache
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.eagle.base import (
    BUCKETS,
    DEPTHS,
    DraftParams,
    EagleDecoder,
    EagleInput,
    eagle_parameter_shapes,
)
from megatron_tlt.models.inputs import DecoderInput
from megatron_tlt.models.torch.layers import rope_table


def eagle_weights(config: ModelConfig, seed: int = 0) -> list[tuple[str, Tensor]]:
    """Random weights of sensible size."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for name, shape in eagle_parameter_shapes(config).items():
        w = torch.randn(shape, generator=generator) * (0.1 if len(shape) == 1 else shape[-1] ** -0.5)
        out.append((name, w + 1 if "norm" in name else w))
    return out


def states(count: int, config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, config.hidden_size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def draft_params(
    count: int, lengths: int | list[int], temperature: float = 1.0, topk: int = 1, **kwargs
) -> DraftParams:
    """Parameters of `count` chains with keys and output positions of their own; rates 1 unless given."""
    rates = kwargs.pop("rates", np.ones((DEPTHS, BUCKETS), np.float32))
    keys = np.random.default_rng(3).integers(0, 1 << 63, count, dtype=np.uint64)
    return DraftParams(
        keys,
        np.arange(count, dtype=np.int32) * 7,
        np.full(count, temperature, np.float32),
        np.broadcast_to(np.asarray(lengths, np.int32), count).copy(),
        topk,
        rates,
        kwargs.pop("min_cumulative_acceptance", 0.0),
        **kwargs,
    )


@dataclass
class Pairs:
    """Feeds pairs of any sequences. Every sequence may hold `longest` positions, in shuffled blocks."""

    drafter: EagleDecoder
    seqs: int
    longest: int = 640
    block_size: int = 32
    seed: int = 0
    kv: KVCache = field(init=False)

    def __post_init__(self) -> None:
        each = -(-self.longest // self.block_size)
        self.kv = self.drafter.new_kv_cache(self.seqs * each, self.block_size)
        order = torch.randperm(self.seqs * each, generator=torch.Generator().manual_seed(self.seed))
        self.tables = order.view(self.seqs, each).to(torch.int32)

    def input(self, chunks: list[tuple[int, int, list[int], Tensor]], first_visible: list[int]) -> EagleInput:
        """chunks: (sequence, first position, tokens, states before them). Wanted: each chunk's last row."""
        positions = [p for _, at, tokens, _ in chunks for p in range(at, at + len(tokens))]
        seq_of = [i for i, chunk in enumerate(chunks) for _ in chunk[2]]
        tables = self.tables[[chunk[0] for chunk in chunks]]
        size = self.block_size
        slots = [int(tables[s, p // size]) * size + p % size for s, p in zip(seq_of, positions, strict=True)]
        starts = np.cumsum([0] + [len(chunk[2]) for chunk in chunks])
        tokens = [t for chunk in chunks for t in chunk[2]]
        contexts = [at + len(ids) for _, at, ids, _ in chunks]
        data = (tokens, positions, slots, starts, contexts, tables, starts[1:] - 1)
        batch = DecoderInput(*(torch.as_tensor(x).to(torch.int32) for x in data))
        hidden = torch.cat([chunk[3] for chunk in chunks]).to(self.drafter.dtype)
        return EagleInput(batch, hidden, torch.tensor(first_visible, dtype=torch.int32))


def expected(
    config: ModelConfig,
    policy: list[tuple[str, Tensor]],
    drafter: list[tuple[str, Tensor]],
    tokens: list[int],
    hidden: Tensor,
    first: int,
) -> tuple[Tensor, Tensor]:
    """Logits [n, V] and hidden states [n, H] of n pairs at positions first, first + 1, ..., which see each other."""
    p, e = dict(policy), dict(drafter)
    n, d, eps = len(tokens), config.head_dim, config.rms_norm_eps

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * e[f"layer.{name}.weight"]

    def project(x: Tensor, name: str) -> Tensor:
        bias = e.get(f"layer.self_attn.{name}_proj.bias", torch.zeros(()))
        return (x @ e[f"layer.self_attn.{name}_proj.weight"].T + bias).view(n, -1, d).transpose(0, 1)

    def turn(x: Tensor) -> Tensor:
        cos, sin = rope_table(config, first + n)[first:].chunk(2, -1)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    x = torch.cat([p["model.embed_tokens.weight"][tokens], hidden], -1) @ e["fc.weight"].T
    q, k, v = (project(x, name) for name in "qkv")
    if config.qk_norm:
        q, k = norm(q, "self_attn.q_norm"), norm(k, "self_attn.k_norm")
    group = config.num_heads // config.num_kv_heads
    k, v = turn(k).repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = turn(q) @ k.transpose(1, 2) / d**0.5
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
    out = (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, -1)
    x = x + out @ e["layer.self_attn.o_proj.weight"].T
    y = norm(x, "post_attention_layernorm")
    gate, up = (y @ e[f"layer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    x = x + (silu(gate) * up) @ e["layer.mlp.down_proj.weight"].T
    return x @ p.get("lm_head.weight", p["model.embed_tokens.weight"]).T, x
