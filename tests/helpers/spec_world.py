"""A small engine under a virtual clock: true costs with noise, drafts that match by confidence class.

Legend: B running requests, N drafted nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from megatron_tlt.rollout.spec.survival import Calibrator
from megatron_tlt.types import DraftStrategy, StepMeasurement

DEPTHS, BUCKETS, WIDTH = 8, 32, 0.25

# Demo policy on one CPU thread, seconds of a forward of B requests and T rows: about linear in both.
CPU = (90e-6, 32e-6, 80e-6)


def measured(strategy, B, rows, counts, drafting, seconds, reached=None, accepted=None):
    """A `StepMeasurement` of a step whose requests emitted `counts` [B] tokens."""
    length = strategy.draft_len
    reached = np.zeros(length, np.int64) if reached is None else reached
    accepted = (np.array(counts)[:, None] - 1 > np.arange(length)).sum(0) if accepted is None else accepted
    return StepMeasurement(strategy, B, rows, drafting, seconds, int(np.sum(counts)), reached, accepted)


def cpu_seconds(B, T):
    """A forward on a CPU core: linear, in steps of four rows."""
    return CPU[0] + CPU[1] * B + CPU[2] * (0.5 * T + 0.5 * 4 * np.ceil(T / 4))


def tiled_seconds(B, T):
    """A forward on a CPU core whose kernels take six rows at a time: the last ones of a tile are almost free."""
    return 40e-6 + 30e-6 * B + 75e-6 * (0.3 * T + 0.7 * 6 * np.ceil(T / 6))


def linear_seconds(B, T):
    """Each row costs as much as any other: nothing can be gained by drafting."""
    return 5e-6 + 100e-6 * T


def gpu_seconds(B, T):
    """A forward on a GPU: flat up to the ridge, then linear."""
    return 3.2e-3 + 4e-6 * B + 14e-6 * np.maximum(0, T - 200)


@dataclass
class SpecWorld:
    """Requests decode until their lengths are used up; `run` keeps the batch full.

    A drafted token's gap is drawn anew, with a memory along the answer (hard passages are hard for a while); it
    matches with probability `quality * (1 - 0.55 exp(-gap))`. The drafter calibrates itself as the real one does.
    Selectors read a noisy clock; `clock` itself runs true, so that strategies can be compared in few steps.
    """

    seed: int = 0
    step_seconds: object = cpu_seconds
    draft_call: float = 30e-6  # a draft call, however long
    draft_row: float = 14e-6  # a drafted token
    catch_up_row: float = 10e-6  # a token that was decoded without the drafter
    overhead: float = 0.0  # a step with drafts, beyond its forward: bookkeeping
    cold: tuple[float, ...] = ()  # factors of the plain steps that follow one with drafts, or the start
    quality: float = 1.0
    mean_gap: float = 3.0
    window: int = 256  # tokens of each request that it catches up with at most
    noise: float = 0.04
    outliers: float = 0.03
    by_position: bool = False
    clock: float = 0.0
    tokens: int = 0
    warm: int = 0  # plain steps in a row
    behind: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self):
        self.rng = np.random.default_rng(self.seed)
        self.calibrator = Calibrator(DEPTHS, BUCKETS)
        self.lengths = np.zeros(0, np.int64)
        self.level = np.zeros(0)

    def start(self, lengths):
        """New requests with these many tokens to go, in place of all others."""
        self.lengths = np.array(lengths, np.int64)
        self.behind = np.zeros(len(lengths), np.int64)
        self.level = self.rng.normal(size=len(lengths))

    def timed(self, seconds):
        """What a clock reads: noise, and now and then a neighbour."""
        seconds *= self.rng.lognormal(0.0, self.noise)
        return seconds * self.rng.uniform(1.5, 6.0) if self.rng.random() < self.outliers else seconds

    def chance(self, gap):
        """True probability that a token with this gap matches."""
        return self.quality * (1 - 0.55 * np.exp(-gap))

    def propose(self, strategy: DraftStrategy):
        """Chains as of the eagle drafter: gaps, cumulative acceptance float32 [B, L], lengths int [B], seconds."""
        B, L = len(self.lengths), strategy.draft_len
        most = np.minimum(L, np.maximum(self.lengths - 1, 0))
        self.level = 0.8 * self.level + 0.6 * self.rng.normal(size=B)
        gaps = self.mean_gap * np.exp(0.6 * self.level)[:, None] * self.rng.exponential(1.0, (B, L))
        bucket = np.minimum(gaps / WIDTH, BUCKETS - 1).astype(np.int32)
        place = np.minimum(np.arange(L), DEPTHS - 1)
        cumulative_acceptance = np.cumprod(self.calibrator.rates[place, bucket], axis=1)
        least = 0.0 if self.by_position else strategy.min_cumulative_acceptance
        alive = (cumulative_acceptance >= least) & (np.arange(L) < most[:, None])
        lengths = np.minimum.accumulate(alive, axis=1).sum(1)
        if self.by_position:
            cumulative_acceptance = np.broadcast_to(
                np.cumprod(self.position_rates)[:L], cumulative_acceptance.shape
            )
        cost = self.draft_call + self.draft_row * (B + lengths.sum())
        cost += self.catch_up_row * np.minimum(self.behind, self.window).sum()
        self.behind[:] = 0
        return gaps, bucket, cumulative_acceptance.astype(np.float32), lengths, float(cost)

    position_rates = np.full(64, 0.7)

    def step(self, selector):
        """One decoding step under `selector`. Returns its strategy and the mask of fed nodes (None if plain)."""
        B = len(self.lengths)
        strategy = selector.select(B)
        if strategy.kind == "none":
            seconds = self.plain_seconds(B)
            seen = self.timed(seconds)
            self.behind += 1
            self._emit(np.ones(B, np.int32), seconds)
            selector.record(measured(strategy, B, B, np.ones(B, np.int32), 0.0, seen))
            return strategy, None
        gaps, bucket, cumulative_acceptance, lengths, drafting = self.propose(strategy)
        L = strategy.draft_len
        node = np.arange(L) < lengths[:, None]
        keep = np.zeros(0, bool)
        if node.any():
            depths = np.broadcast_to(np.arange(1, L + 1, dtype=np.int32), node.shape)[node]
            keep = selector.prune(
                strategy, B, cumulative_acceptance[node], depths, lengths.astype(np.int32), None
            )
        fed = np.zeros(node.shape, bool)
        fed[node] = keep
        matched = fed & (self.rng.random(node.shape) < self.chance(gaps))
        accepted = np.minimum.accumulate(matched, axis=1) if L else matched
        reached = fed.copy()
        reached[:, 1:] &= accepted[:, :-1]
        place = np.broadcast_to(np.minimum(np.arange(L), DEPTHS - 1), node.shape)
        if reached.any():
            self.calibrator.observe(place[reached], bucket[reached], accepted[reached])
        counts = (accepted.sum(1) + 1).astype(np.int32)
        rows = B + int(fed.sum())
        seconds = float(self.step_seconds(B, rows)) + self.overhead
        self.warm = 0
        self._emit(counts, drafting + seconds)
        times = self.timed(drafting), self.timed(seconds)
        selector.record(measured(strategy, B, rows, counts, *times, reached.sum(0), accepted.sum(0)))
        return strategy, keep

    def plain_seconds(self, B):
        """Of the next plain step."""
        factor = self.cold[self.warm] if self.warm < len(self.cold) else 1.0
        self.warm += 1
        return float(self.step_seconds(B, B)) * factor

    def _emit(self, counts, seconds):
        self.clock += seconds
        self.tokens += int(counts.sum())
        self.lengths = self.lengths - counts
        going = self.lengths > 0
        if not going.all():
            self.lengths, self.behind, self.level = (
                a[going] for a in (self.lengths, self.behind, self.level)
            )

    def run(self, selector, steps, running=None):
        """`steps` steps with `running` requests that never end. Returns (tokens, seconds)."""
        if running is not None:
            self.start([1 << 40] * running)
        tokens, clock = self.tokens, self.clock
        for _ in range(steps):
            self.step(selector)
        return self.tokens - tokens, self.clock - clock

    def drain(self, selector, lengths):
        """Answers of these lengths, all started at once. Returns the seconds, and those of plain decoding."""
        self.start(lengths)
        started = self.clock
        while len(self.lengths):
            self.step(selector)
        running = (np.array(lengths)[:, None] > np.arange(max(lengths))).sum(0)
        return self.clock - started, sum(float(self.step_seconds(B, B)) for B in running)
