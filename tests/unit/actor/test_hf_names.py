"""Cutting Hugging Face tensors over tensor-parallel ranks and joining them again."""

from __future__ import annotations

import pytest
import torch

from megatron_tlt.actor.hf_names import shard, slots, unshard
from megatron_tlt.models.config import ModelConfig


def config(**fields: object) -> ModelConfig:
    base = {
        "family": "qwen2",
        "vocab_size": 13,
        "hidden_size": 16,
        "num_layers": 4,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 6,
        "intermediate_size": 20,
        "qkv_bias": True,
        "qk_norm": True,
    }
    return ModelConfig(**{**base, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_unshard_undoes_shard(tp: int) -> None:
    shape = config()
    shapes = shape.parameter_shapes()
    for slot in slots(shape, pp=1):
        full = [torch.randn(shapes[name]) for name in slot.hf_names]
        parts = [shard(shape, slot, full, rank, tp) for rank in range(tp)]
        assert len({part.shape for part in parts}) == 1
        for name, before, after in zip(slot.hf_names, full, unshard(shape, slot, parts), strict=True):
            assert torch.equal(before, after), name


def test_vocabulary_is_padded_with_zero_rows() -> None:
    shape = config()
    slot = slots(shape, pp=1)[0]
    last = shard(shape, slot, [torch.ones(13, 16)], 3, 4)
    assert last.shape == (4, 16)
    assert last.sum(1).tolist() == [16.0, 0.0, 0.0, 0.0]


def test_a_rank_gets_whole_key_value_groups() -> None:
    """Rank 1 of 4 holds query heads 2 and 3, key head 1, value head 1, in this order."""
    shape = config()
    slot = next(s for s in slots(shape, pp=1) if s.kind == "qkv" and s.hf_names[0].endswith("bias"))
    q, k, v = (
        torch.arange(heads).repeat_interleave(6) + start for heads, start in ((8, 0), (4, 100), (4, 200))
    )
    assert shard(shape, slot, [q, k, v], 1, 4).tolist() == [2] * 6 + [3] * 6 + [101] * 6 + [201] * 6


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_every_tensor_is_exported_once(tied: bool, pp: int) -> None:
    shape = config(tie_word_embeddings=tied)
    exported = [name for slot in slots(shape, pp) if slot.exported for name in slot.hf_names]
    assert sorted(exported) == sorted(shape.parameter_shapes())
    copies = [slot for slot in slots(shape, pp) if not slot.exported]
    assert len(copies) == (1 if tied and pp > 1 else 0)
