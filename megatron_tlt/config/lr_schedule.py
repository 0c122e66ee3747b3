"""The learning rate as a function of the optimizer step: warm-up, then constant, linear or cosine. Pure."""

from __future__ import annotations

import math

from megatron_tlt.config.actor import OptimizerSection


def learning_rate(section: OptimizerSection, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (0-based) of a run of `total_steps`.

    Warm-up reaches the peak with its last step, and no step has rate 0. A decaying shape then goes from the
    peak to `min_lr`, which it reaches at the end of the run.
    """
    warmup = section.warmup_steps
    if step < warmup:
        return section.lr * (step + 1) / warmup
    if section.schedule == "constant":
        return section.lr
    end = max(total_steps, warmup + 1)
    done = min(1.0, (step - warmup) / (end - warmup))
    left = 1.0 - done if section.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return section.min_lr + (section.lr - section.min_lr) * left
