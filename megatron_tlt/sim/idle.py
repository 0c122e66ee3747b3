"""The wait for the slowest replica: who trains the drafter, for how long, and what the drafter learns. Torch-free.

    replica 0   rollout ====================================|
    replica 1   rollout ===========|  train train train trai|n     the last micro-step may end late: all wait
    replica 2   rollout ====|idle|  train train train train  |

`idle.policy.IdlePolicy` decides, on `IdleView`s with the tail that `expected_wait` and `tokens_left` make of what busy
replicas would report. Approximated: decisions are made at `_LOOKS` moments of the wait, nearer to each other
towards its end, instead of before every micro-step; of more than `_REPORTERS` busy replicas so many report.

How a drafter gets better is a model with two constants (`config.sim.SimTrainingSection`): an update of the policy
undoes `drift` of its adaptation, and n tokens of training bring 1 - exp(-n / tokens_to_adapt) of what is missing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_tlt.config.sim import SimConfig
from megatron_tlt.idle.policy import (
    Action,
    BusyReplica,
    IdlePolicy,
    IdleView,
    expected_wait,
    tokens_left,
)
from megatron_tlt.idle.state import RankState
from megatron_tlt.sim.rollout import ReplicaRollout

_LOOKS = 16
_REPORTERS = 6


@dataclass(frozen=True, slots=True)
class Waits:
    """What the replicas did after their last answers, in seconds of the rollout."""

    ends: np.ndarray  # float64 [R], of each one's last answer
    trains: np.ndarray  # float64 [R], seconds inside micro-steps
    micro_steps: int
    done: float  # the slowest replica's last answer
    late: float  # seconds that the last micro-step made all ranks wait


class IdleTime:
    """Decides the waits of all replicas with the production policy."""

    def __init__(self, config: SimConfig, micro_step: float):
        self._policy = IdlePolicy.of(config.idle)
        self._micro_step = micro_step

    def waits(self, rollouts: Sequence[ReplicaRollout], usual: np.ndarray | None) -> Waits:
        """Of one step. `usual` are the lengths of the step before, ascending; None: there was none."""
        ends = np.array([r.seconds for r in rollouts])
        done, first = float(ends.max()), float(ends.min())
        if done <= first or not self._policy.train_drafter:
            return Waits(ends, np.zeros(len(ends)), 0, done, 0.0)
        looks = done - (done - first) * np.linspace(1.0, 0.0, _LOOKS, endpoint=False) ** 2
        edges = np.append(looks, done)
        tails = [self._tail(rollouts, ends, float(at), usual) for at in looks]
        at_once = np.array([self._trains(tail, 0.0) for tail in tails])
        patient = np.array([self._trains(tail, self._policy.min_tail_seconds) for tail in tails])
        return self._divide(ends, done, edges, at_once, patient, rollouts)

    def _trains(self, tail: float | None, seconds_idle: float) -> bool:
        """What the production policy says of a replica that has waited `seconds_idle`."""
        view = IdleView(RankState.IDLE, seconds_idle, expected_wait=tail, micro_step_seconds=self._micro_step)
        return self._policy.decide(view) is Action.TRAIN

    def _tail(
        self, rollouts: Sequence[ReplicaRollout], ends: np.ndarray, now: float, usual: np.ndarray | None
    ) -> float | None:
        """The wait that the leader expects at `now`, from the reports of busy replicas."""
        busy = np.flatnonzero(ends > now)
        if len(busy) > _REPORTERS:
            slowest = busy[ends[busy].argmax()]
            busy = np.append(busy[np.linspace(0, len(busy) - 1, _REPORTERS).astype(int)], slowest)
        replicas = []
        for at in busy.tolist():
            rollout = rollouts[at]
            generated = float(np.interp(now, rollout.times, rollout.generated))
            guess = np.array([256.0]) if usual is None else usual
            left = tokens_left(rollout.lengths_at(now), 0, guess)
            replicas.append(BusyReplica(left, generated / max(now, 1e-9)))
        return expected_wait(replicas)

    def _divide(
        self,
        ends: np.ndarray,
        done: float,
        edges: np.ndarray,
        at_once: np.ndarray,
        patient: np.ndarray,
        rollouts: Sequence[ReplicaRollout],
    ) -> Waits:
        """Seconds of training of each replica in the intervals between `edges` in which the policy trains."""
        policy, step = self._policy, self._micro_step
        least = np.where(
            at_once[np.clip(np.searchsorted(edges, ends, side="right") - 1, 0, len(at_once) - 1)], 0.0, 1.0
        )
        begins = ends + least * policy.min_tail_seconds
        begins[[not len(r.lengths) for r in rollouts]] = math.inf
        low, high = edges[:-1], edges[1:]
        spans = np.clip(high - np.maximum(low, begins[:, None]), 0.0, None) * patient
        trains = spans.sum(axis=1)
        steps = np.floor(trains / step)
        to_the_end = patient[-1] & (begins < done)
        running = int(np.count_nonzero(to_the_end))
        late = (
            step * running / (running + 1) if running else 0.0
        )  # the last of so many that end evenly spread
        steps += to_the_end  # what runs is finished
        trains = np.minimum(steps * step, np.where(begins < done, done + late - begins, 0.0))
        return Waits(ends, np.maximum(trains, 0.0), int(steps.sum()), done, late)


class DrafterModel:
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
