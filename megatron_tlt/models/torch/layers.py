"""The small parts of a decoder in PyTorch: norm, rotary embedding, SiLU gate.

Legend: T rows, H hidden size, D head size, P positions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import silu

from megatron_tlt.models.config import ModelConfig


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, computed in float32 (Zhang and Sennrich, 1910.07467)."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


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
