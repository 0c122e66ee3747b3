"""The small parts of a decoder in PyTorch: norm, rotary embedding, SiLU gate, experts.

`LayerOps` are the operations of a layer, and a drafter's choice of tokens: in PyTorch (`PLAIN`), or on CUDA one kernel
each between its matrix products (`kernels.layers`).

Legend: T rows, H hidden size, D head size, P positions, I MLP width, Hq/Hkv query and kv heads; E experts, k chosen by
a row, F width of an expert (of this rank's part).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, linear, silu

from megatron_tlt.models.decoders.keyed_noise import best_candidates
from megatron_tlt.models.hf.config import ModelConfig


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, computed in float32 (Zhang and Sennrich, 1910.07467)."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """One matrix of the rows of all `parts`, which become views of it: one product instead of several."""
    whole = torch.cat([part.data for part in parts])
    for part, rows in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = rows
    return whole


def gated_silu(gate_up: Tensor) -> Tensor:
    """[T, 2I] holding gate then up -> silu(gate) * up, [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """[D/2] float32 rotary frequencies, with Llama 3's scaling if the model has it.

    Llama 3: wavelengths longer than original/low are stretched by `factor`, those shorter than
    original/high are kept, and those between are interpolated.
    """
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequency = 1.0 / (config.rope_theta**steps)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    wavelength = 2 * math.pi / frequency
    turns = scaling.original_max_position_embeddings / wavelength  # rotations within the original context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    mixed = (1 - keep) * frequency / scaling.factor + keep * frequency
    mixed = torch.where(turns < scaling.low_freq_factor, frequency / scaling.factor, mixed)
    return torch.where(turns > scaling.high_freq_factor, frequency, mixed)


def rope_table(config: ModelConfig, positions: int, device: torch.device | str = "cpu") -> Tensor:
    """[P, D] float32: D/2 cosines, then D/2 sines, for positions 0 .. P-1."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(config))
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(device)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotates heads x [T, heads, D] by the rows' entries of the table, rope [T, D] (halves convention)."""
    cos, sin = rope[:, None].chunk(2, dim=-1)
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


HeadNorms = tuple[Tensor, Tensor, float]  # weights [D] of queries and keys, epsilon


class LayerOps(NamedTuple):
    """Operations of a layer, which write into the cache and into `out` only, and of a drafter."""

    # x [T, K], weight [N, K], bias [N] or None, out [T, N] or None (then a new tensor) -> x weight^T + bias
    product: Callable[..., Tensor]

    # x [T, H], part [T, H] or None, weight [H], epsilon -> x + part, and its norm
    add_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
    # qkv [T, (Hq + 2 Hkv) D], norms, rope [T, D], slots [T], one layer's cache [2, slots, Hkv, D] -> q [T, Hq, D].
    # Queries and keys are normed and rotated; keys and values go into the cache. Hq may be 0.
    rotate_into: Callable[[Tensor, HeadNorms | None, Tensor, Tensor, Tensor], Tensor]
    # [T, 2I] holding gate then up -> silu(gate) * up, [T, I]
    gated_silu: Callable[[Tensor], Tensor]
    # rows h [T, H], router [E, H], k, whether the gates of a row are made to sum to 1 -> gates float32 [T, k], experts
    # int [T, k], best first. Scores are float32 in models of every type, as the actor's are: rounding must not choose.
    route: Callable[[Tensor, Tensor, int, bool], tuple[Tensor, Tensor]]
    # h [T, H], gates, experts, gate_up [E, 2F, H], down [E, H, F] -> sums [T, H] of experts' outputs times gates
    mix_experts: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    # as `keyed_noise.best_candidates`; may overwrite its logits, which are contiguous
    best_candidates: Callable[..., tuple[Tensor, Tensor]]


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    if out is None:
        return linear(x, weight, bias)
    return torch.mm(x, weight.T, out=out) if bias is None else torch.addmm(bias, x, weight.T, out=out)


def add_norm(x: Tensor, part: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x if part is None else x + part
    return total, rms_norm(total, weight, eps)


def rotate_into(qkv: Tensor, norms: HeadNorms | None, rope: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
    kv_heads, d = cache.shape[-2:]
    heads = qkv.unflatten(-1, (-1, d))
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    if norms is not None:
        q, k = rms_norm(q, norms[0], norms[2]), rms_norm(k, norms[1], norms[2])
    cache[0][slots], cache[1][slots] = rotate(k, rope), v
    return rotate(q, rope)


def route(h: Tensor, router: Tensor, k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    gates, ids = linear(h.float(), router.float()).softmax(-1).topk(k, dim=-1)
    return gates / gates.sum(-1, keepdim=True) if renormalise else gates, ids


def mix_experts(h: Tensor, gates: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Gathers the rows of each expert; the offsets stay on the device."""
    k, flat = ids.shape[1], ids.flatten()
    order = flat.argsort(stable=True)
    every = torch.arange(gate_up.shape[0], device=h.device, dtype=flat.dtype)
    ends = torch.searchsorted(flat[order], every, right=True).to(torch.int32)
    inner = gated_silu(grouped_mm(h[order // k], gate_up.transpose(1, 2), offs=ends))
    out = h.new_empty(len(flat), h.shape[1])
    out[order] = grouped_mm(inner, down.transpose(1, 2), offs=ends)
    return (out.unflatten(0, (-1, k)).float() * gates[..., None]).sum(1).to(h.dtype)


PLAIN = LayerOps(product, add_norm, rotate_into, gated_silu, route, mix_experts, best_candidates)
