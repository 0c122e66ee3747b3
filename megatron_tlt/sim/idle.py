"""The wait for the slowest replica: which replicas pre-roll and train, for how long, and the drafter's adaptation.
Torch-free.

    replica 0   rollout ====================================|
    replica 1   rollout ===========|  train train train trai|n     the last micro-step may end late: all wait
    replica 2   rollout ====|idle|  pre-rollout ~~~~~~~~~~~~|

`idle.policy.decide` is asked, again after some micro-steps or a part of the wait.

How a drafter gets better is a model with two constants (`config.sim.SimTrainingSection`): an update of the policy
undoes `drift` of its adaptation, and n tokens of training close 1 - exp(-n / tokens_to_adapt) of the gap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_tlt.config.idle import POLL_S
from megatron_tlt.config.sim import SimConfig
from megatron_tlt.idle.policy import Action, IdleView, RecentWindows, decide
from megatron_tlt.sim.rollouts import ReplicaRollout

_ASKED = 16  # times that the policy is asked in a window in which it trains
PreRoll = Callable[[list[float], float], Sequence[float]]
"""Pre-rolls on replicas from these seconds (inf: never) until those; returns when each has no request left."""


@dataclass(frozen=True, slots=True)
class Waits:
    """The replicas' waits behind their last responses, in seconds of the rollout."""

    ends: np.ndarray  # float64 [R], of each one's last response
    trains: np.ndarray  # float64 [R], seconds inside micro-steps
    pre_rolls: np.ndarray  # float64 [R], seconds of pre-rollouts
    micro_steps: int
    done: float  # the slowest replica's last response
    late: float  # seconds that the last decoding step, or micro-steps, made all ranks wait


@dataclass(slots=True)
class _Window:
    """One replica's."""

    past: RecentWindows
    end: float  # of its last response
    samples: int
    now: float  # until which it has decided
    can_pre_roll: bool
    steps: int = 0  # micro-steps
    pre_rolls: float = 0.0  # seconds


class IdleTime:
    """Decides the waits of all replicas with the production policy."""

    def __init__(self, config: SimConfig, micro_step: float, decode_step: float = 0.0):
        """Seconds of a micro-step of training and of a decoding step of pre-rollouts."""
        self._section = config.idle
        self._micro_step, self._decode_step = micro_step, decode_step
        self._past: list[RecentWindows] = []  # of each replica

    def waits(self, rollouts: Sequence[ReplicaRollout], pre_roll: PreRoll | None = None) -> Waits:
        """Of one step."""
        ends = np.array([r.seconds for r in rollouts])
        done, step = float(ends.max()), self._micro_step
        self._past = self._past or [RecentWindows() for _ in rollouts]
        windows = [
            _Window(past, r.seconds, len(r.lengths), r.seconds, pre_roll is not None)
            for past, r in zip(self._past, rollouts, strict=True)
        ]
        starts = [window.now if self._comes_to_pre_roll(window, done) else math.inf for window in windows]
        if pre_roll is not None and min(starts) < done:
            for window, start, until in zip(windows, starts, pre_roll(starts, done), strict=True):
                if start < done:
                    window.now, window.can_pre_roll, window.pre_rolls = until, False, until - start
                    self._comes_to_pre_roll(window, done)
        # A running step is finished: the last of so many that end evenly spread.
        training = sum(window.now > done for window in windows)
        decoding = sum(window.now == done and window.pre_rolls > 0 for window in windows)
        late = max(step * training / (training + 1), self._decode_step * decoding / (decoding + 1))
        for window in windows:  # the least micro-steps are due whether a rank waits or not
            due = self._section.min_steps_per_window - window.steps
            if due > 0 and self._section.train_drafter and window.samples:
                window.steps += due
                window.now += due * step
                late = max(late, window.now - done)
        trains = [w.steps * step - max(0.0, w.now - done - late) for w in windows]
        for window, trained in zip(windows, trains, strict=True):
            window.past.add(done + late - window.end, trained)
        return Waits(
            ends,
            np.array(trains),
            np.array([window.pre_rolls for window in windows]),
            sum(window.steps for window in windows),
            done,
            late,
        )

    def _comes_to_pre_roll(self, window: _Window, done: float) -> bool:
        """Trains and waits until the policy pre-rolls (True) or all replicas are done. Mutates the window."""
        step, past, at_once = self._micro_step, window.past, 1
        if step and not window.can_pre_roll:  # the policy does not look at the share of training then
            at_once = max(1, int((done - window.end) / _ASKED / step))
        while window.now < done:
            idle = window.now - window.end
            view = IdleView(
                idle,
                samples_available=window.samples,
                steps=window.steps,
                step_seconds=step,
                can_pre_roll=window.can_pre_roll,
                training_share=past.training_share(idle, window.steps * step),
                usual_seconds=past.usual_seconds,
            )
            action = decide(self._section, view)
            if action is Action.PRE_ROLL:
                return True
            if action is Action.TRAIN:
                steps = min(at_once, math.ceil((done - window.now) / step))
                window.steps += steps
                window.now += steps * step
            else:
                window.now = min(done, window.now + max(POLL_S, idle / 4))
        return False


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
