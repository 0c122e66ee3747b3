"""Random drafters and responses for tests of trained drafters."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_tlt.drafters.eagle.config import EagleConfig
from megatron_tlt.drafters.model import DrafterConfig
from megatron_tlt.drafters.training.batching import DraftSequence
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.types import HiddenStateSample
from tests.helpers.hidden_states import trajectory
from tests.helpers.tiny_models import random_tensors

FAMILIES = {
    "qwen2": ModelConfig("qwen2", 101, 64, 2, 4, 2, 16, 96, qkv_bias=True, max_position_embeddings=512),
    "qwen3": ModelConfig("qwen3", 101, 64, 2, 4, 4, 32, 96, qk_norm=True, max_position_embeddings=512),
    "llama": ModelConfig("llama", 101, 64, 2, 8, 1, 16, 96, max_position_embeddings=512),
}
LAYERS = 8
DEEP = {name: replace(policy, num_layers=LAYERS) for name, policy in FAMILIES.items()}  # of which eagle3 reads three


def random_drafter(config: ModelConfig | DrafterConfig, seed: int = 0) -> dict[str, Tensor]:
    """Full tensors of a drafter, of kind eagle for a policy; a reduced vocabulary is a random subset."""
    made = EagleConfig.of(config) if isinstance(config, ModelConfig) else config
    shapes = {name: shape for name, shape in made.shapes().items() if name not in ("d2t", "t2d")}
    out = dict(random_tensors(shapes, seed))
    if made.reduced:
        order = torch.randperm(made.policy.vocab_size, generator=torch.Generator().manual_seed(seed))
        ids = order[: made.draft_vocab_size].sort().values
        known = torch.zeros(made.policy.vocab_size, dtype=torch.bool)
        known[ids] = True
        out |= {"d2t": ids - torch.arange(len(ids)), "t2d": known}
    return out


def layer_outputs(config: ModelConfig, length: int, seed: int = 3) -> Tensor:
    """Made-up outputs of every layer, [L, T, H]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(config.num_layers, length, config.hidden_size, generator=generator)


def random_sequence(
    config: ModelConfig | DrafterConfig, length: int, prompt_len: int, seed: int = 0
) -> DraftSequence:
    """A response of length T with the hidden states that a drafter reads, of kind eagle for a policy.

    For eagle3 [T, 4H], the columns of `layer_outputs` and a final state; else [T - 1, H].
    """
    policy = config if isinstance(config, ModelConfig) else config.policy
    layers = () if isinstance(config, ModelConfig) else config.aux_layers
    generator = torch.Generator().manual_seed(seed * 1000 + length)
    tokens = torch.randint(0, policy.vocab_size, (length,), generator=generator)
    states = torch.randn(length - (not layers), policy.hidden_size, generator=generator)
    if layers:
        outputs = layer_outputs(policy, length, seed)
        states = torch.cat([*(outputs[i] for i in layers), states], -1)
    return DraftSequence.of(HiddenStateSample(trajectory(tokens.numpy(), prompt_len), states))


def lookup_tables(config: ModelConfig, seed: int = 5) -> tuple[Tensor, Tensor]:
    """An embedding and an LM head, [V, H] each."""
    generator = torch.Generator().manual_seed(seed)
    shape = (config.vocab_size, config.hidden_size)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator) * 0.3
