"""The wait for the slowest replica: which replicas train the drafter, for how long, and its adaptation. Torch-free.

    replica 0   rollout ====================================|
    replica 1   rollout ===========|  train train train trai|n     the last micro-step may end late: all wait
    replica 2   rollout ====|idle|  train train train train  |

`idle.policy.IdlePolicy` decides: a replica that has waited `idle.min_tail_seconds`, and a micro-step's seconds, trains
until the slowest is done.

How a drafter gets better is a model with two constants (`config.sim.SimTrainingSection`): an update of the policy
undoes `drift` of its adaptation, and n tokens of training close 1 - exp(-n / tokens_to_adapt) of the gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_tlt.config.sim import SimConfig
from megatron_tlt.idle.policy import Action, IdlePolicy, IdleView
from megatron_tlt.sim.rollouts import ReplicaRollout


@dataclass(frozen=True, slots=True)
class Waits:
    """The replicas' waits behind their last responses, in seconds of the rollout."""

    ends: np.ndarray  # float64 [R], of each one's last response
    trains: np.ndarray  # float64 [R], seconds inside micro-steps
    micro_steps: int
    done: float  # the slowest replica's last response
    late: float  # seconds that the last micro-step made all ranks wait


class IdleTime:
    """Decides the waits of all replicas with the production policy."""

    def __init__(self, config: SimConfig, micro_step: float):
        self._policy = IdlePolicy.of(config.idle)
        self._micro_step = micro_step

    def waits(self, rollouts: Sequence[ReplicaRollout]) -> Waits:
        """Of one step."""
        ends = np.array([r.seconds for r in rollouts])
        step = self._micro_step
        done = float(ends.max())
        begins = ends + max(self._policy.min_tail_seconds, step)
        trains = (begins < done) & [self._trains(done - r.seconds, len(r.lengths)) for r in rollouts]
        running = int(np.count_nonzero(trains))
        if not running:
            return Waits(ends, np.zeros(len(ends)), 0, done, 0.0)
        # The last of so many micro-steps that end evenly spread. A running one is finished.
        late = step * running / (running + 1)
        steps = np.where(trains, np.floor(np.maximum(done - begins, 0.0) / step) + 1, 0.0)
        seconds = np.minimum(steps * step, np.where(trains, done + late - begins, 0.0))
        return Waits(ends, seconds, int(steps.sum()), done, late)

    def _trains(self, seconds_idle: float, samples: int) -> bool:
        """Whether a replica that has waited so long trains, by the production policy."""
        view = IdleView(seconds_idle, samples_available=samples, step_seconds=self._micro_step)
        return self._policy.decide(view) is Action.TRAIN


class Adaptation:
    """How well the trained drafter is adapted to the policy: `quality` 0 to 1."""

    def __init__(self, config: SimConfig):
        self._training = config.training
        self.quality = config.training.start_quality

    def train(self, tokens: float) -> None:
        """All replicas together have trained on so many tokens. Mutates the quality."""
        self.quality = 1 - (1 - self.quality) * math.exp(-tokens / self._training.tokens_to_adapt)

    def policy_moved(self) -> None:
        """The policy was updated. Mutates the quality."""
        self.quality *= 1 - self._training.drift
