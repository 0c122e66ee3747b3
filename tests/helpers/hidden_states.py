"""Random hidden states of responses."""

from __future__ import annotations

import numpy as np
import torch

from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.types import HiddenStateSample, Trajectory


def random_chunk(
    config: ModelConfig, length: int, prompt_id: int = 0, version: int = 0, prompt_len: int = 3
) -> HiddenStateSample:
    """Made-up tokens and hidden states, a function of the arguments."""
    length = int(length)
    generator = torch.Generator().manual_seed(length * 1000 + prompt_id)
    tokens = torch.randint(0, config.vocab_size, (length,), generator=generator)
    hidden = torch.randn(length - 1, config.hidden_size, generator=generator)
    return HiddenStateSample(trajectory(tokens.numpy(), prompt_len, prompt_id, version), hidden)


def trajectory(token_ids: np.ndarray, prompt_len: int, prompt_id: int = 0, version: int = 0) -> Trajectory:
    """These tokens, all drawn behind the prompt's."""
    logprobs = np.zeros(len(token_ids) - prompt_len, np.float32)
    return Trajectory(prompt_id, 0, token_ids.astype(np.int32), logprobs, policy_version=version)
