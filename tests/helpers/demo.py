"""The demo policy's hidden states of the traces it was taught, for tests and benchmarks of the drafter."""

from __future__ import annotations

import numpy as np
import torch
from demo_traces import generate
from torch import Tensor

from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.drafter.pretrain import lookup_tables
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.factory import build_decoder
from megatron_tlt.models.loader import iter_weights
from megatron_tlt.types import HiddenStateSample
from tests.helpers.mpi import ROOT
from tests.helpers.whole_texts import read_hidden_states

POLICY = ROOT / "assets" / "demo-policy"


def demo_config() -> ModelConfig:
    return ModelConfig.from_hf(POLICY)


def demo_tables() -> tuple[Tensor, Tensor]:
    """Embedding and LM head, float32 [V, H]."""
    return lookup_tables(POLICY, demo_config(), torch.device("cpu"))


def demo_chunks(count: int, seed: int, version: int = 0) -> list[HiddenStateSample]:
    """Questions with the answers the policy was trained to give, natural lengths; seeds are disjoint streams."""
    tokenizer = HFTokenizer(POLICY)
    texts, prompts = [], []
    for example in generate(count, seed):
        prompt = tokenizer.encode_chat(example.prompt)
        texts.append([*prompt, *tokenizer.encode(example.completion), tokenizer.eos_token_ids[0]])
        prompts.append(len(prompt))
    decoder = build_decoder(demo_config())
    decoder.load_weights(iter_weights(POLICY, demo_config()))
    states = read_hidden_states(decoder, texts, 16, 4096)
    return [
        HiddenStateSample(i, 0, version, np.array(text, np.int32), hidden[:-1].clone(), prompt_len)
        for i, (text, prompt_len, hidden) in enumerate(zip(texts, prompts, states, strict=True))
    ]
