"""Cutting Hugging Face tensors over tensor-parallel ranks and joining them again.

How they are cut is in the converter's tests, against tensors made loop by loop.
"""

from __future__ import annotations

import pytest
import torch

from megatron_tlt.actor.hf_names import shard, slots, unshard
from megatron_tlt.models.hf.config import ModelConfig


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_unshard_undoes_shard(tp: int) -> None:
    shape = ModelConfig(
        family="qwen2",
        vocab_size=13,
        hidden_size=16,
        num_layers=4,
        num_heads=8,
        num_kv_heads=4,
        head_dim=6,
        intermediate_size=20,
        qkv_bias=True,
        qk_norm=True,
    )
    shapes = shape.parameter_shapes()
    for slot in slots(shape, pp=1):
        full = [torch.randn(shapes[name]) for name in slot.hf_names]
        parts = [shard(shape, slot, full, rank, tp) for rank in range(tp)]
        assert len({part.shape for part in parts}) == 1
        for name, before, after in zip(slot.hf_names, full, unshard(shape, slot, parts), strict=True):
            assert torch.equal(before, after), name
