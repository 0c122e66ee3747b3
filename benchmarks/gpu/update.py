"""A training step of the recipe's policy: forward, GRPO loss, backward, clipping, Adam; tokens a second and MFU. The
same with many lengths, whose plans and kernels must not be built for each; with LoRA; and of a layer of experts.

MFU is 6 operations a matrix element and token (2 forward, 4 backward) and attention's products, causal, over the
device's peak: recomputed activations count as time, not as work (Chowdhery et al., arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

import gc
import statistics
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.bounds import train_flops
from benchmarks.gpu.check import TINY, Check
from benchmarks.gpu.result import Result
from megatron_tlt.actor.policy import MegatronPolicy
from megatron_tlt.config.actor import LoraSection
from megatron_tlt.config.root import Config
from megatron_tlt.config.run import DistributedSection
from megatron_tlt.distributed.world import World
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.types import TrainBatch, TrainSequence, Trajectory

PROMPT = 32  # tokens; the rest of a sequence is trained
# One layer of Qwen3-30B-A3B, without its vocabulary.
EXPERTS = ModelConfig(
    "qwen3_moe", 2048, 2048, 1, 32, 4, 128, 6144, tie_word_embeddings=True, qk_norm=True, num_experts=128,
    num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, moe_layers=(0,),
    max_position_embeddings=8192,
)  # fmt: skip
FEW_EXPERTS = replace(
    EXPERTS, vocab_size=288, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, num_experts=6,
    num_experts_per_tok=2, moe_intermediate_size=24, max_position_embeddings=TINY.max_position_embeddings,
)  # fmt: skip


class Surrogate:
    """ratio * advantage with ratio = 1: the first step of GRPO."""

    def loss(self, x: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum over the response tokens of one micro-batch."""
        return -((x.logprobs - x.logprobs.detach()).exp() * x.advantages * x.mask).sum(), {}


@dataclass(frozen=True)
class Case:
    """A policy and a batch. Figures of the first case have no name before them."""

    name: str
    lengths: list[int]
    actor: dict[str, Any] = field(default_factory=dict)
    mini_batches: int = 1
    shape: ModelConfig | None = None


def run(check: Check, found: Result) -> None:
    """Packed sequences of one length, of 200 lengths, adapters with two optimizer steps, one layer of experts."""
    length, count = (64, 4) if check.smoke else (2048, 32)
    wide = [8 + 3 * i for i in range(8)] if check.smoke else [100 + 9 * i for i in range(200)]
    experts = FEW_EXPERTS if check.smoke else EXPERTS
    same, config = [length] * count, check.config()
    world = World.start(DistributedSection(device=check.device.type))
    for case in (
        Case("", same),
        Case("lengths_", [n + PROMPT for n in wide]),
        Case("lora_", same, {"lora": LoraSection(rank=16)}, mini_batches=2),
        Case("experts_", same, shape=experts),
    ):
        measure(check, found, world, config, case, 2 if check.smoke else 5)
        gc.collect()
    world.close()


def measure(check: Check, found: Result, world: World, config: Config, case: Case, repeats: int) -> None:
    """Seconds of the first step, which builds and compiles, of the next ones, and what waits for the device in one:
    without Transformer Engine the gradient's norm does, once a parameter.
    """
    longest, few = max(case.lengths), {"micro_batch_tokens": 128} if check.smoke else {}
    actor = config.actor.model_copy(update={"dtype": check.dtype_name} | few | case.actor)
    path = str(check.random_policy(case.shape))
    section = config.model.model_copy(
        update={"path": path, "max_context": max(longest, actor.micro_batch_tokens), "architecture": None}
    )
    policy = MegatronPolicy(world, section, actor, config.optimizer, Surrogate(), 1000)
    batch = TrainBatch(*mini_batches(sequences(case.lengths, policy.config.vocab_size), case.mini_batches))
    first = check.seconds(lambda: policy.train_step(batch), repeats=1, warm_up=0)[0]
    if check.is_cuda:
        torch.cuda.reset_peak_memory_stats(check.device)
    taken = check.seconds(lambda: policy.train_step(batch), repeats=repeats, warm_up=0)
    waits = sum("Synchronize" in name for name in check.events(lambda: policy.train_step(batch)))
    metrics, tokens, seconds = policy.train_step(batch).metrics, sum(case.lengths), statistics.median(taken)
    timed = {"first_s": first, "seconds": seconds, "min": min(taken), "max": max(taken), "waits": waits}
    found.add_row({"case": case.name.rstrip("_") or "length", "tokens": tokens, **timed, **metrics})
    found.note({f"{case.name}tokens_per_s": tokens / seconds, f"{case.name}first_over_median": first / seconds})
    if not case.name:
        work = train_flops(policy.config, len(case.lengths), longest)
        found.note({"mfu": work / seconds / check.peaks().flops, "grad_norm": metrics["grad_norm"]})
        if check.is_cuda:
            found.note({"peak_gib": torch.cuda.max_memory_allocated(check.device) / 2**30})
    if not 0 < metrics["grad_norm"] < float("inf"):
        found.fail(f"{case.name}gradient norm {metrics['grad_norm']}")


def mini_batches(made: list[TrainSequence], count: int) -> tuple[list[list[TrainSequence]], list[float]]:
    """The sequences of each optimizer step, and its response tokens."""
    parts = [made[i::count] for i in range(count)]
    return parts, [float(sum(len(s.advantages) for s in part)) for part in parts]


def sequences(lengths: list[int], vocab: int) -> list[TrainSequence]:
    """Random tokens, a random advantage each."""
    rng, made = np.random.default_rng(0), []
    for i, length in enumerate(lengths):
        trajectory = Trajectory(i, 0, rng.integers(0, vocab, length), np.zeros(length - PROMPT, np.float32))
        made.append(TrainSequence.of(trajectory))
        made[-1].advantages += np.float32(rng.normal())
    return made
