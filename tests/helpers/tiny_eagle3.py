"""Random EAGLE-3 drafters and sequences with the outputs of every policy layer."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_tlt.drafter.batching import DraftSequence
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.eagle.eagle3 import Eagle3Config
from tests.helpers.tiny_models import random_tensors

LAYERS = 8
POLICIES = {
    "qwen2": ModelConfig("qwen2", 101, 64, LAYERS, 4, 2, 16, 96, qkv_bias=True, max_position_embeddings=512),
    "qwen3": ModelConfig("qwen3", 101, 64, LAYERS, 4, 4, 32, 96, qk_norm=True, max_position_embeddings=512),
    "llama": ModelConfig("llama", 101, 64, LAYERS, 8, 1, 16, 96, max_position_embeddings=512),
}


def random_eagle3(config: Eagle3Config, seed: int = 0) -> dict[str, Tensor]:
    """Full tensors of sensible size; a reduced vocabulary is a random subset."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: shape for name, shape in config.shapes().items() if name not in ("d2t", "t2d")}
    out = dict(random_tensors(shapes, seed))
    if config.reduced:
        order = torch.randperm(config.policy.vocab_size, generator=generator)
        ids = order[: config.draft_vocab_size].sort().values
        known = torch.zeros(config.policy.vocab_size, dtype=torch.bool)
        known[ids] = True
        out |= {"d2t": ids - torch.arange(len(ids)), "t2d": known}
    return out


def layer_outputs(config: ModelConfig, length: int, seed: int = 3) -> Tensor:
    """Made-up outputs of every layer, [L, T, H]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(config.num_layers, length, config.hidden_size, generator=generator)


def random_sequence3(config: Eagle3Config, length: int, prompt_len: int, seed: int = 3) -> DraftSequence:
    """Tokens with the three layers' columns of `layer_outputs` and a final state: hidden [T, 4H]."""
    outputs = layer_outputs(config.policy, length, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    tokens = torch.randint(0, config.policy.vocab_size, (length,), generator=generator)
    final = torch.randn(length, config.policy.hidden_size, generator=generator)
    return DraftSequence(tokens, torch.cat([*(outputs[i] for i in config.layers), final], -1), prompt_len)
