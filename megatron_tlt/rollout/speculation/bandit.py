"""TLT's bucketed epsilon-greedy bandit over speculation strategies (arXiv 2511.16665, section 5.3).

Three differences from its published code: a bucket has several arms; the reward is the tokens per second of the step
itself, not an accept length measured at another time; exploration decays between two weight syncs. Torch-free, no
clock of its own.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from math import inf
from statistics import median

from megatron_tlt.rollout.speculation.step_costs import Expected
from megatron_tlt.types import NO_DRAFT, DraftStrategy, StepMeasurement

_DECAY = 0.995  # of epsilon, a step
_WINDOW = 50  # rewards of an arm that count, the last ones


class BucketedEpsilonGreedy:
    """A `StrategySelector` that plays the arm with the most tokens per second (median), by number of running requests.

    Arms without rewards come first, in their order; of equal medians the arm named first is played. With probability
    epsilon, which decays with every step of the bucket since the last weight sync, an arm is drawn at random.
    """

    def __init__(self, arms: Sequence[DraftStrategy], thresholds: Sequence[int], epsilon: float):
        """`thresholds`: running requests at which buckets begin, rising; fewer belong to the first bucket."""
        self.arms = {arm.name: arm for arm in arms}
        self._thresholds = list(thresholds)
        self._epsilon = epsilon
        self._random = random.Random(0)
        self._rewards = [{name: deque[float](maxlen=_WINDOW) for name in self.arms} for _ in thresholds]
        self._scores = [dict.fromkeys(self.arms, inf) for _ in thresholds]  # medians of the rewards; inf: none yet
        self._steps = [0 for _ in thresholds]  # since the last weight sync

    def _bucket(self, num_running: int) -> int:
        return max(0, bisect_right(self._thresholds, num_running) - 1)

    def epsilon(self, num_running: int) -> float:
        """Present share of exploring steps in the bucket of `num_running` requests."""
        return float(self._epsilon * _DECAY ** self._steps[self._bucket(num_running)])

    def select(self, num_running: int) -> DraftStrategy:
        """The bucket's best arm, or a random one with probability epsilon. Mutates the random state."""
        best, scores = self.usual(num_running), self._scores[self._bucket(num_running)]
        if scores[best.name] != inf and self._random.random() < self.epsilon(num_running):
            best = self.arms[self._random.choice(list(self.arms))]
        return best

    def usual(self, num_running: int) -> DraftStrategy:
        scores = self._scores[self._bucket(num_running)]
        return self.arms[max(scores, key=scores.__getitem__)]

    def expected(self, num_running: int) -> Expected:
        """Nothing: an arm's score does not tell its seconds."""
        return Expected()

    def record(self, measurement: StepMeasurement) -> None:
        """The reward is the step's tokens per second."""
        name = measurement.strategy.name
        bucket = self._bucket(measurement.num_running)
        rewards = self._rewards[bucket][name]
        rewards.append(measurement.num_emitted / (measurement.draft_seconds + measurement.step_seconds))
        self._scores[bucket][name] = median(rewards)
        self._steps[bucket] += 1

    def drafter_changed(self) -> None:
        """Arms that draft count as not yet played."""
        for rewards, scores in zip(self._rewards, self._scores, strict=True):
            for name in self.arms.keys() - {NO_DRAFT.name}:
                rewards[name].clear()
                scores[name] = inf

    def policy_changed(self) -> None:
        """Exploration begins anew: an arm that has lost may win by now, as the drafter or its history has grown."""
        self._steps = [0 for _ in self._thresholds]
