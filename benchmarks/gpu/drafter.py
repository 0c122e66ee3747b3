"""One micro-step of the drafter's training, in bf16 and with FP8 linears, at the width of a 7B policy.

Random hidden states and tokens: time and memory do not depend on them. The table shows tokens a second, the step's peak
of memory beyond what it started with, and how far FP8's gradient is from that of bf16.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.check import TINY, Check, reason
from benchmarks.gpu.result import Result, Row
from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.drafters.eagle.config import EagleConfig
from megatron_tlt.drafters.eagle.model import EagleModel
from megatron_tlt.drafters.training.batching import DraftSequence, collate
from megatron_tlt.drafters.training.fp8 import use_fp8
from megatron_tlt.drafters.training.trainer import DrafterTrainer
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.hf.config import ModelConfig

SEVEN = ModelConfig("qwen2", 152064, 3584, 28, 28, 4, 128, 18944, qkv_bias=True)  # Qwen2.5-7B
MODES = ("off", "te")
SEQUENCES, TOKENS = 2, 2048  # a micro-step of 4k tokens
FARTHEST = 0.3  # of an FP8 gradient from the bf16 one, over its norm


def run(check: Check, found: Result) -> None:
    """All arithmetic that are installed here; one that is not is named in its row."""
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
    first: Tensor | None = None
    for mode in MODES:
        try:
            row, gradient = measure(check, config, head, batch, mode)
        except ConfigError as error:
            found.add_row({"fp8": mode, "why_not": reason(error)})
            continue
        first = gradient if first is None else first
        row["gradient_off"] = float((gradient - first).norm() / first.norm())
        found.add_row(row)
        if row["gradient_off"] > FARTHEST:
            found.fail(f"{mode}: its gradient is {row['gradient_off']:.0%} off")
    summarize(found)


def measure(
    check: Check, config: ModelConfig, head: Tensor, sequences: list[DraftSequence], mode: str
) -> tuple[Row, Tensor]:
    """One arithmetic: the row, and the first step's gradient of the layer's attention output projection."""
    model = EagleModel(EagleConfig.of(config))
    model.initialise(0)
    model.to(check.device)
    precision: Callable[[], AbstractContextManager[object]] = nullcontext
    if mode != "off":
        precision = use_fp8(model, check.device)
    section = DrafterSection(dtype="bf16" if check.is_cuda else "fp32", draft_steps=1)
    trainer = DrafterTrainer(model, section, precision=precision)
    batch = collate(sequences)
    trainer.backward(batch, (head, head))
    weight = dict(model.named_parameters())["layer.self_attn.o_proj.weight"]
    assert weight.grad is not None
    gradient = weight.grad.float().clone()
    if check.is_cuda:
        torch.cuda.reset_peak_memory_stats(check.device)
    before = torch.cuda.memory_allocated(check.device) if check.is_cuda else 0
    taken = check.seconds(lambda: trainer.step(batch, (head, head)), repeats=3 if check.smoke else 10)
    peak = torch.cuda.max_memory_allocated(check.device) - before if check.is_cuda else 0
    count = sum(len(s.token_ids) for s in sequences)
    row = {"fp8": mode, "tokens": count, "ms": 1e3 * statistics.median(taken), "min_ms": 1e3 * min(taken)}
    return row | {"tokens_per_s": count / statistics.median(taken), "peak_mib": peak / 2**20}, gradient


def summarize(found: Result) -> None:
    """Tokens a second, and FP8 over bf16. Mutates `found`."""
    rates = {row["fp8"]: row["tokens_per_s"] for row in found.rows if "tokens_per_s" in row}
    found.note({"tokens_per_s": rates["off"]})
    found.note({f"{mode}_over_bf16": rate / rates["off"] for mode, rate in rates.items() if mode != "off"})
    found.note({"peak_mib": found.rows[0]["peak_mib"]})
