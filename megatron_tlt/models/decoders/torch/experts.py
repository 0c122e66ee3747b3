"""Experts in the PyTorch decoder: their weights, and their products in batch-invariant arithmetic.

Legend: T rows, H hidden size, E experts, k chosen by a row, F width of an expert (of this rank's part).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from megatron_tlt.config.checks.layout import GROUPED, grouped_step
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.decoders.base import Shard
from megatron_tlt.models.decoders.torch.invariant import rowwise
from megatron_tlt.models.decoders.torch.layers import gated_silu
from megatron_tlt.models.hf.config import ModelConfig


def empty_experts(config: ModelConfig, shard: Shard, like: Tensor) -> dict[str, Tensor]:
    """The weights of a layer's experts: zeros of the type and device of `like`.

    The shared expert, if there is one, is a dense MLP with a gate. Raises ConfigError for sizes that PyTorch's grouped
    product refuses.
    """
    e, h, width, shared = config.num_experts, config.hidden_size, shard.expert_inter, shard.shared_inter
    step = grouped_step(like.dtype.itemsize)
    for field, size in (("hidden_size", h), ("moe_intermediate_size / rollout.tp", width)):
        if size % step:
            raise ConfigError.of(field, size, f"must be a multiple of {step}: {GROUPED}")
    shapes = {"gate": (e, h), "experts_gate_up": (e, 2 * width, h), "experts_down": (e, h, width)}
    if shared:
        shapes |= {"gate_up": (2 * shared, h), "down_proj": (h, shared), "shared_expert_gate": (1, h)}
    return {name: like.new_zeros(shape) for name, shape in shapes.items()}


def mix_alike(h: Tensor, gates: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """`LayerOps.mix_experts` of one tile (`invariant.py`): every expert that a row chose computes all rows."""
    out = torch.zeros_like(h, dtype=torch.float32)
    for expert in ids.unique().tolist():
        here = ids == expert
        gate = torch.where(here, gates, 0.0).sum(-1, keepdim=True)  # of one number and zeros: exact
        done = linear(rowwise(gated_silu, linear(h, gate_up[expert])), down[expert]).float()
        out = torch.where(here.any(-1, keepdim=True), out + gate * done, out)
    return out.to(h.dtype)
