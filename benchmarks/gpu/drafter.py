"""One micro-step of the drafter's training at the width of a 7B policy.

Random hidden states and tokens: time and memory do not depend on them. The table shows tokens a second and the step's
peak of memory beyond what it started with.
"""

from __future__ import annotations

import statistics

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.check import TINY, Check
from benchmarks.gpu.result import Result, Row
from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.drafter.batching import DraftSequence, collate
from megatron_tlt.drafter.trainer import DrafterTrainer
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.eagle.config import EagleConfig
from megatron_tlt.models.eagle.model import EagleModel

SEVEN = ModelConfig("qwen2", 152064, 3584, 28, 28, 4, 128, 18944, qkv_bias=True)  # Qwen2.5-7B
SEQUENCES, TOKENS = 2, 2048  # a micro-step of 4k tokens


def run(check: Check, found: Result) -> None:
    """The step in bf16 (float32 on a CPU)."""
    config = TINY if check.smoke else SEVEN
    tokens = 32 if check.smoke else TOKENS
    generator = torch.Generator(check.device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, device=check.device)
        return values.mul_(shape[-1] ** -0.5).to(check.dtype)

    head = draw(config.vocab_size, config.hidden_size)
    ids = torch.randint(0, config.vocab_size, (SEQUENCES, tokens), generator=generator, device=check.device)
    states = draw(SEQUENCES, tokens, config.hidden_size)
    prompt = tokens // 8
    drawn = np.arange(tokens) >= prompt
    batch = [DraftSequence(i, h, drawn, prompt) for i, h in zip(ids, states, strict=True)]
    row = measure(check, config, head, batch)
    found.add_row(row)
    found.note({name: row[name] for name in ("tokens_per_s", "peak_mib")})


def measure(check: Check, config: ModelConfig, head: Tensor, sequences: list[DraftSequence]) -> Row:
    """Tokens a second, and the peak of memory."""
    model = EagleModel(EagleConfig.of(config))
    model.initialise(0)
    model.to(check.device)
    section = DrafterSection(dtype="bf16" if check.is_cuda else "fp32", draft_steps=1)
    trainer = DrafterTrainer(model, head, head, section)
    batch = collate(sequences)
    trainer.backward(batch)
    if check.is_cuda:
        torch.cuda.reset_peak_memory_stats(check.device)
    before = torch.cuda.memory_allocated(check.device) if check.is_cuda else 0
    taken = check.seconds(lambda: trainer.step(batch), repeats=3 if check.smoke else 10)
    peak = torch.cuda.max_memory_allocated(check.device) - before if check.is_cuda else 0
    count = sum(len(s.token_ids) for s in sequences)
    row = {"tokens": count, "ms": 1e3 * statistics.median(taken), "min_ms": 1e3 * min(taken)}
    return row | {"tokens_per_s": count / statistics.median(taken), "peak_mib": peak / 2**20}

