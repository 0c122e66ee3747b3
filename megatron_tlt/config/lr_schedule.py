"""The learning rate as a function of the optimizer step: warm-up, then constant, linear or cosine. Pure."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

Schedule = Literal["constant", "linear", "cosine"]


class LearningRate(NamedTuple):
    """A learning rate that warms up to `peak` and then goes as `schedule` says."""

    peak: float
    warmup_steps: int = 0
    schedule: Schedule = "constant"
    lowest: float = 0.0  # what a decaying schedule ends with

    def at(self, step: int, total_steps: int) -> float:
        """Learning rate of optimizer step `step` (0-based) of a run of `total_steps`.

        Warm-up reaches the peak with its last step, and no step has rate 0. A decaying shape then goes from the
        peak to `lowest`, which it reaches at the end of the run.
        """
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.peak
        end = max(total_steps, self.warmup_steps + 1)
        done = min(1.0, (step - self.warmup_steps) / (end - self.warmup_steps))
        left = 1.0 - done if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.lowest + (self.peak - self.lowest) * left
