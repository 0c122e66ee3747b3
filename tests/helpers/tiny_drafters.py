"""Random drafters and answers for tests of the eagle drafter."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_tlt.drafter.batching import DraftSequence
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.eagle.base import eagle_parameter_shapes
from tests.helpers.tiny_models import random_tensors

FAMILIES = {
    "qwen2": ModelConfig("qwen2", 101, 64, 2, 4, 2, 16, 96, qkv_bias=True, max_position_embeddings=512),
    "qwen3": ModelConfig("qwen3", 101, 64, 2, 4, 4, 32, 96, qk_norm=True, max_position_embeddings=512),
    "llama": ModelConfig("llama", 101, 64, 2, 8, 1, 16, 96, max_position_embeddings=512),
}


def random_drafter(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Weights of an eagle drafter of this policy."""
    return dict(random_tensors(eagle_parameter_shapes(config), seed))


def random_sequence(config: ModelConfig, length: int, prompt_len: int, seed: int = 0) -> DraftSequence:
    """An answer with made-up hidden states of every position but the last."""
    generator = torch.Generator().manual_seed(seed * 1000 + length)
    tokens = torch.randint(0, config.vocab_size, (length,), generator=generator)
    return DraftSequence(tokens, torch.randn(length - 1, config.hidden_size, generator=generator), prompt_len)


def lookup_tables(config: ModelConfig, seed: int = 5) -> tuple[Tensor, Tensor]:
    """An embedding and an LM head, [V, H] each."""
    generator = torch.Generator().manual_seed(seed)
    shape = (config.vocab_size, config.hidden_size)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator) * 0.3
