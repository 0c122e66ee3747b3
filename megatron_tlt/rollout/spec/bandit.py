"""TLT's bucketed epsilon-greedy bandit over speculation strategies. Torch-free, no clock of its own.

Source: TLT (2511.16665), section 5.3. Two things differ from its published code on purpose: a bucket has several
arms, and the reward is made of one step's own tokens and seconds, never of accept lengths seen elsewhere.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from megatron_tlt.errors import ConfigError
from megatron_tlt.rollout.spec.selector import WholeStrategies
from megatron_tlt.types import NO_DRAFT, DraftStrategy, StepMeasurement

_WHERE = "rollout.speculation.bandit"
_MASK = (1 << 64) - 1


def parse_arm(text: str, kind: str, min_cumulative_acceptance: float = 0.0) -> DraftStrategy:
    """`LENGTH_TOPK_VERIFY` as a strategy of drafter `kind`; 0_1_1 is plain decoding.

    Raises ConfigError, naming rollout.speculation.bandit.arms, for anything else.
    """
    match = re.fullmatch(r"(\d+)_(\d+)_(\d+)", text)
    where = f"{_WHERE}.arms"
    if match is None:
        raise ConfigError.of(where, text, "must be DRAFT-LENGTH_TOPK_TOKENS-TO-VERIFY, such as 4_1_5")
    length, topk, verify = (int(group) for group in match.groups())
    if length == 0:
        if (topk, verify) != (1, 1):
            raise ConfigError.of(where, text, "an arm that drafts nothing is written 0_1_1")
        return NO_DRAFT
    if not (length <= 32 and 1 <= topk <= 4):
        raise ConfigError.of(where, text, "draft length must be at most 32 and topk 1 to 4")
    if not 2 <= verify <= length * topk + 1:
        most = length * topk + 1
        raise ConfigError.of(where, text, f"tokens to verify, the last one included, must be 2 to {most}")
    return DraftStrategy(kind, length, topk, verify, min_cumulative_acceptance)


class _Arm:
    """The last `window` rewards of one arm in one bucket, also in order of size."""

    __slots__ = ("recent", "sizes", "window")

    def __init__(self, window: int):
        self.recent: deque[float] = deque()
        self.sizes: list[float] = []
        self.window = window

    def add(self, reward: float) -> None:
        if len(self.recent) == self.window:
            del self.sizes[bisect_left(self.sizes, self.recent.popleft())]
        self.recent.append(reward)
        insort(self.sizes, reward)

    @property
    def score(self) -> float:
        """The median; infinite while the arm was never played."""
        sizes = self.sizes
        if not sizes:
            return float("inf")
        middle = len(sizes) // 2
        return sizes[middle] if len(sizes) % 2 else (sizes[middle - 1] + sizes[middle]) / 2


class BucketedEpsilonGreedy(WholeStrategies):
    """Plays the arm with the best median of tokens per second in the bucket of running requests.

    Arms never played come first, in their order; ties go to the arm named first. With probability epsilon, which
    decays with every step of the bucket, any arm is played. Draws depend on the seed, the bucket and the number of its
    steps only.
    """

    def __init__(
        self,
        arms: Sequence[DraftStrategy],
        thresholds: Sequence[int],
        epsilon: float = 0.1,
        decay: float = 0.995,
        window: int = 50,
        seed: int = 0,
    ):
        """`thresholds`: running requests at which buckets begin; fewer than the first count as the first bucket.

        Raises ConfigError for no arms, arms given twice or thresholds that do not rise.
        """
        if not arms or len({arm.name for arm in arms}) < len(arms):
            raise ConfigError.of(
                f"{_WHERE}.arms", [a.name for a in arms], "must be one arm at least, none twice"
            )
        if not thresholds or any(b <= a for a, b in pairwise(thresholds)):
            raise ConfigError.of(f"{_WHERE}.thresholds", list(thresholds), "must rise")
        self.arms = tuple(arms)
        self._index = {arm.name: i for i, arm in enumerate(self.arms)}
        self._thresholds = list(thresholds)
        self._epsilon, self._decay, self._seed = epsilon, decay, seed
        buckets = range(len(self._thresholds))
        self._plays = [[_Arm(window) for _ in self.arms] for _ in buckets]
        self._steps = [0 for _ in buckets]

    def bucket(self, running: int) -> int:
        """Index of the bucket of `running` requests."""
        return max(0, bisect_right(self._thresholds, running) - 1)

    def epsilon(self, running: int) -> float:
        """Present share of exploring steps in the bucket of `running` requests."""
        return float(self._epsilon * self._decay ** self._steps[self.bucket(running)])

    def select(self, num_running: int) -> DraftStrategy:
        """The arm for a step of `num_running` requests. Depends on the recorded steps only, and mutates nothing."""
        bucket = self.bucket(num_running)
        plays = self._plays[bucket]
        scores = [arm.score for arm in plays]
        best = scores.index(max(scores))
        if plays[best].sizes:
            draw = _hash(self._seed, bucket, self._steps[bucket])
            if (draw >> 11) * 2.0**-53 < self.epsilon(num_running):
                best = (draw & 0x7FF) % len(self.arms)
        return self.arms[best]

    def record(self, measurement: StepMeasurement) -> None:
        """See `StrategySelector.record`. The reward is the step's tokens per second."""
        arm, bucket = self._index[measurement.strategy.name], self.bucket(measurement.num_running)
        seconds = measurement.draft_seconds + measurement.step_seconds
        self._plays[bucket][arm].add(measurement.num_emitted / seconds)
        self._steps[bucket] += 1

    def state_dict(self) -> dict[str, Any]:
        """Windows by bucket and arm, steps by bucket."""
        plays = [
            {arm.name: list(play.recent) for arm, play in zip(self.arms, row, strict=True)}
            for row in self._plays
        ]
        return {
            "selector": "beg_mab",
            "thresholds": self._thresholds,
            "plays": plays,
            "steps": self._steps[:],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes `state_dict`'s; nothing if it is of another selector or of other buckets. New arms start unseen."""
        if state.get("selector") != "beg_mab" or list(state["thresholds"]) != self._thresholds:
            return
        self._steps = [int(steps) for steps in state["steps"]]
        for row, saved in zip(self._plays, state["plays"], strict=True):
            for at, arm in enumerate(self.arms):
                row[at] = _Arm(row[at].window)
                for reward in saved.get(arm.name, ()):
                    row[at].add(reward)


def _hash(seed: int, bucket: int, step: int) -> int:
    """64 well-mixed bits (the finalizer of SplitMix64)."""
    x = (seed * 0x9E3779B97F4A7C15 + (bucket << 48) + step + 1) * 0x9E3779B97F4A7C15 & _MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)
