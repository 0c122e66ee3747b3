"""Feature chunks for tests: random ones, and those of a policy that the drafter can imitate exactly."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.eagle.model import EagleModel
from megatron_tlt.models.keyed_noise import gumbel_noise, key_tensor
from megatron_tlt.models.keys import row_keys
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


def imitable_policy(config: ModelConfig, drafter: EagleModel, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Embedding and LM head [V, H] of a policy whose next hidden state is fc [E(token) ; hidden state] exactly.

    Mutates `drafter`: its layer adds nothing to what fc gives, so it has the policy's whole knowledge.
    """
    h, generator = config.hidden_size, torch.Generator().manual_seed(seed)
    with torch.no_grad():
        mix = torch.linalg.qr(torch.randn(h, h, generator=generator))[0]
        read = torch.randn(h, h, generator=generator) * h**-0.5
        drafter.fc.weight.copy_(torch.cat([read, 0.7 * mix], dim=1))
        drafter.layer.self_attn.o_proj.weight.zero_()
        drafter.layer.mlp.down_proj.weight.zero_()
    shape = (config.vocab_size, h)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator) * 0.4


def imitable_chunk(
    drafter: EagleModel,
    embed: Tensor,
    head: Tensor,
    length: int,
    prompt_len: int,
    key: int,
    prompt_id: int = 0,
) -> HiddenStateSample:
    """A response of that policy, sampled with `key` at temperature 1, and its hidden states."""
    weight = drafter.fc.weight.detach()
    generator = torch.Generator().manual_seed(key)
    tokens = torch.randint(0, embed.shape[0], (prompt_len,), generator=generator).tolist()
    hidden = [torch.randn(embed.shape[1], generator=generator)]
    for place in range(1, length):
        if place >= prompt_len:
            keys = row_keys(np.array([key], np.uint64), np.array([place - prompt_len], np.int64))
            noise = gumbel_noise(key_tensor(keys, embed.device), len(head))[0]
            tokens.append(int((head @ hidden[-1] + noise).argmax()))
        hidden.append(weight @ torch.cat([embed[tokens[place]], hidden[-1]]))
    states = torch.stack(hidden[: length - 1])
    return HiddenStateSample(trajectory(np.array(tokens), prompt_len, prompt_id), states, key)
