"""Random EAGLE-3 drafters and sequences with the outputs of every policy layer."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_tlt.drafter.batching import DraftSequence
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.drafters import DrafterConfig
from megatron_tlt.types import HiddenStateSample
from tests.helpers.hidden_states import trajectory

LAYERS = 8
POLICIES = {
    "qwen2": ModelConfig("qwen2", 101, 64, LAYERS, 4, 2, 16, 96, qkv_bias=True, max_position_embeddings=512),
    "qwen3": ModelConfig("qwen3", 101, 64, LAYERS, 4, 4, 32, 96, qk_norm=True, max_position_embeddings=512),
    "llama": ModelConfig("llama", 101, 64, LAYERS, 8, 1, 16, 96, max_position_embeddings=512),
}


def layer_outputs(config: ModelConfig, length: int, seed: int = 3) -> Tensor:
    """Made-up outputs of every layer, [L, T, H]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(config.num_layers, length, config.hidden_size, generator=generator)


def random_sequence3(config: DrafterConfig, length: int, prompt_len: int, seed: int = 3) -> DraftSequence:
    """Tokens with the three layers' columns of `layer_outputs` and a final state: hidden [T, 4H]."""
    outputs = layer_outputs(config.policy, length, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    tokens = torch.randint(0, config.policy.vocab_size, (length,), generator=generator)
    final = torch.randn(length, config.policy.hidden_size, generator=generator)
    states = torch.cat([*(outputs[i] for i in config.aux_layers), final], -1)
    return DraftSequence.of(HiddenStateSample(trajectory(tokens.numpy(), prompt_len), states))
