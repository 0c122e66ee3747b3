"""A small engine under a virtual clock: true costs with noise, drafts whose cumulative acceptance is known.

Legend: B running requests, T rows, L draft length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_tlt.rollout.speculation.selector import FixedSelector
from megatron_tlt.types import DraftStrategy, StepMeasurement


def measured(strategy, B, rows, counts, drafting, seconds):
    """A `StepMeasurement` of a step whose requests emitted `counts` [B] tokens."""
    accepted = (np.array(counts)[:, None] - 1 > np.arange(strategy.draft_len)).sum(0)
    return StepMeasurement(strategy, B, rows, drafting, seconds, int(np.sum(counts)), strategy.draft_len, accepted)


def cpu_seconds(B, T):
    """A forward on a CPU core whose kernels take six rows at a time: the last ones of a tile are almost free."""
    return 40e-6 + 30e-6 * B + 75e-6 * (0.3 * T + 0.7 * 6 * np.ceil(T / 6))


def bf16_seconds(B, T):
    """SmolLM2 on a core with AVX-512 BF16, as measured: from 8 rows on, each costs as much as any other."""
    return np.interp(T, (1, 2, 4, 8, 16, 64, 4096), (0.014, 0.014, 0.016, 0.018, 0.03, 0.106, 6.8))


def linear_seconds(B, T):
    """Each row costs as much as any other: nothing can be gained by drafting."""
    return 5e-6 + 100e-6 * T


def gpu_seconds(B, T):
    """A forward on a GPU: flat up to the ridge, then linear."""
    return 3.2e-3 + 4e-6 * B + 14e-6 * np.maximum(0, T - 200)


def expert_seconds(B, T):
    """Reading the weights of Qwen3-30B-A3B on a GPU: T rows read 128 (1 - (1 - 8 / 128)^T) experts of each layer."""
    return 0.9e-3 + 0.17e-3 * 128 * (1 - (1 - 8 / 128) ** T)


@dataclass
class SpecWorld:
    """Requests decode until their lengths are used up.

    A drafted token matches with a probability that varies around `quality` and has a memory along the response: hard
    passages are hard for a while. Selectors read a noisy clock; `clock` itself runs true.
    """

    seed: int = 0
    step_seconds: object = cpu_seconds
    draft_call: float = 30e-6  # a draft call, however long
    draft_node: float = 14e-6  # a drafted token
    quality: float = 0.8
    cold: tuple[float, ...] = ()  # factors of the plain steps that follow one with drafts
    noise: float = 0.04
    outliers: float = 0.03
    clock: float = 0.0
    tokens: int = 0
    plain_steps: int = 0  # in a row

    def __post_init__(self):
        self.rng = np.random.default_rng(self.seed)
        self.start([])

    def start(self, lengths):
        """New requests with these many tokens to go, in place of all others."""
        self.lengths = np.array(lengths, np.int64)
        self.level = self.rng.normal(size=len(lengths))

    def timed(self, seconds):
        """What a clock reads: noise, and now and then a neighbour."""
        seconds *= self.rng.lognormal(0.0, self.noise)
        return seconds * self.rng.uniform(1.5, 6.0) if self.rng.random() < self.outliers else seconds

    def step(self, selector):
        """One decoding step under `selector`."""
        B, strategy = len(self.lengths), selector.select(len(self.lengths))
        counts, rows, drafting, factor = np.ones(B, np.int64), B, 0.0, 1.0
        if strategy.kind == "none":
            factor = self.cold[self.plain_steps] if self.plain_steps < len(self.cold) else 1.0
            self.plain_steps += 1
        else:
            counts, rows, drafting = self.draft(strategy)
            self.plain_steps = 0
        seconds = float(self.step_seconds(B, rows)) * factor
        self.clock += seconds + drafting
        self.tokens += int(counts.sum())
        self.lengths = self.lengths - counts
        self.level, self.lengths = self.level[self.lengths > 0], self.lengths[self.lengths > 0]
        selector.record(measured(strategy, B, rows, counts, self.timed(drafting), self.timed(seconds)))

    def draft(self, strategy: DraftStrategy):
        """Emitted tokens [B], rows fed and drafting seconds of a step with drafts."""
        B, L = len(self.lengths), strategy.draft_len
        self.level = 0.8 * self.level + 0.6 * self.rng.normal(size=B)
        chance = self.quality ** np.exp(0.6 * self.level)[:, None] * np.ones(L)
        likely = np.cumprod(chance, axis=1)
        drafted = (likely >= strategy.min_cumulative_acceptance) & (np.arange(L) < self.lengths[:, None] - 1)
        accepted = np.logical_and.accumulate(drafted & (self.rng.random(drafted.shape) < chance), axis=1)
        seconds = self.draft_call + self.draft_node * (B + int(drafted.sum()))
        return accepted.sum(1) + 1, B + int(drafted.sum()), seconds

    def run(self, selector, steps, running=None):
        """`steps` steps with `running` requests that never end (None: those that run). Returns tokens per second."""
        if running is not None:
            self.start([1 << 40] * running)
        tokens, clock = self.tokens, self.clock
        for _ in range(steps):
            self.step(selector)
        return (self.tokens - tokens) / (self.clock - clock)

    def plain_speed(self):
        """Tokens per second of plain decoding with the present requests."""
        B = len(self.lengths)
        return B / float(self.step_seconds(B, B))


def fixed_speeds(running, lengths, **world):
    """Tokens per second of fixed draft lengths; 0 is plain decoding."""
    speeds = {0: SpecWorld(**world)}
    speeds[0].start([1 << 40] * running)
    speeds[0] = speeds[0].plain_speed()
    for length in lengths:
        selector = FixedSelector(DraftStrategy("trained", length))
        speeds[length] = SpecWorld(**world).run(selector, 200 + 1000 // running, running)
    return speeds
