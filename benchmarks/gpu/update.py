"""A training step of the recipe's policy: forward, GRPO loss, backward, clipping, Adam; tokens a second and MFU.

MFU is 6 operations a matrix element and token (2 forward, 4 backward) and attention's products, causal, over the
device's peak: recomputed activations count as time, not as work (Chowdhery et al., arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.bounds import train_flops
from benchmarks.gpu.check import Check
from benchmarks.gpu.result import Result
from megatron_tlt.actor.policy import MegatronPolicy
from megatron_tlt.config.run import DistributedSection
from megatron_tlt.distributed.world import World
from megatron_tlt.types import TrainBatch, TrainSequence, Trajectory

PROMPT = 32  # tokens; the rest of a sequence is trained


class Surrogate:
    """ratio * advantage with ratio = 1: the first step of GRPO."""

    needs_reference = False

    def loss(self, x: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum over the response tokens of one micro-batch."""
        return -((x.logprobs - x.logprobs.detach()).exp() * x.advantages * x.mask).sum(), {}


def run(check: Check, found: Result) -> None:
    """Packed sequences of one micro-batch each, as the recipe sizes it."""
    peaks, config = check.peaks(), check.config()
    length, count, repeats = (64, 4, 2) if check.smoke else (2048, 32, 5)
    actor = config.actor.model_copy(
        update={"dtype": check.dtype_name} | ({"micro_batch_tokens": 128} if check.smoke else {})
    )
    world = World.start(DistributedSection(device=check.device.type))
    section = config.model.model_copy(
        update={"path": str(check.random_policy()), "max_context": max(length, actor.micro_batch_tokens)}
    )
    policy = MegatronPolicy(world, section, actor, config.optimizer, Surrogate(), 1000)
    batch = TrainBatch([sequences(count, length, policy.config.vocab_size)], [float(count * (length - PROMPT))])
    metrics = policy.train_step(batch).metrics
    if check.is_cuda:
        torch.cuda.reset_peak_memory_stats(check.device)
    taken = check.seconds(lambda: policy.train_step(batch), repeats=repeats, warm_up=1)
    seconds, tokens = statistics.median(taken), count * length
    work = train_flops(policy.config, count, length)
    found.add_row({"tokens": tokens, "seconds": seconds, "min": min(taken), "max": max(taken), **metrics})
    found.note({"tokens_per_s": tokens / seconds, "mfu": work / seconds / peaks.flops})
    found.note({"grad_norm": metrics["grad_norm"]})
    if check.is_cuda:
        found.note({"peak_gib": torch.cuda.max_memory_allocated(check.device) / 2**30})
    if not 0 < metrics["grad_norm"] < float("inf"):
        found.fail(f"gradient norm {metrics['grad_norm']}")
    world.close()


def sequences(count: int, length: int, vocab: int) -> list[TrainSequence]:
    """Random tokens of one length, a random advantage each."""
    rng, response = np.random.default_rng(0), length - PROMPT
    made = []
    for i in range(count):
        trajectory = Trajectory(i, 0, rng.integers(0, vocab, length), np.zeros(response, np.float32))
        made.append(TrainSequence.of(trajectory))
        made[-1].advantages += np.float32(rng.normal())
    return made
