"""When an idle rank pre-rolls or trains, and when it stops. Pure: no clock, no torch, no MPI.

The simulator runs this file as it is, so everything it needs comes in as values.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from megatron_tlt.config.idle import IdleSection


TRAINING_SHARE = 0.25
"""Of the idle seconds of recent windows, where prompts are left to pre-roll: a drafter follows its policy with little
training, and what is pre-rolled saves the next step's own tokens.
"""
_FADE = 0.9  # from one window to the next: ten windows count, as lengths and speeds change over a run


class Action(IntEnum):
    """The next action of an idle rank. Ordered: the ranks of a tensor-parallel group take the highest proposal."""

    WAIT = 0
    TRAIN = 1
    PRE_ROLL = 2
    STOP = 3


@dataclass(frozen=True, slots=True)
class IdleView:
    """All that a decision depends on."""

    seconds_idle: float
    """Since the replica had its last request."""
    samples_available: int
    """Sequences to train on."""
    is_over: bool = False
    """Every rank is done."""
    steps: int = 0
    """Micro-steps of this window."""
    step_seconds: float = 0.0
    """Of a usual micro-step, in this window or before it; 0: not known."""
    can_pre_roll: bool = False
    """Prompts of the next two steps have not been pre-rolled in this window."""
    training_share: float = 0.0
    """Of the idle seconds of recent windows and this one, those in micro-steps."""
    usual_seconds: float = 0.0
    """Idle seconds of a recent window, on average; 0: it is the first."""


@dataclass(slots=True)
class RecentWindows:
    """Idle time of one rank's earlier windows, the latest of which count most."""

    _idle: float = 0.0  # seconds, faded
    _trained: float = 0.0  # of them in micro-steps
    _count: float = 0.0  # of windows, faded

    def add(self, idle: float, trained: float) -> None:
        """A window has ended, of `idle` seconds, `trained` of them in micro-steps."""
        self._idle = _FADE * self._idle + idle
        self._trained = _FADE * self._trained + trained
        self._count = _FADE * self._count + 1

    def training_share(self, idle: float, trained: float) -> float:
        """`IdleView.training_share` in a window of so many seconds until now; 0 without any."""
        idle += self._idle
        return (self._trained + trained) / idle if idle > 0 else 0.0

    @property
    def usual_seconds(self) -> float:
        """`IdleView.usual_seconds`."""
        return self._idle / self._count if self._count else 0.0


def decide(section: IdleSection, view: IdleView) -> Action:
    """For one idle replica (replicas need not agree): TRAIN where a micro-step is possible and due or the wait is long;
    STOP when every rank is done; else WAIT.

    A wait is taken to last as long again as it has lasted. All ranks wait for the end of a micro-step that is begun
    too late, so one begins when it is expected to end before the wait does.

    Where prompts are left to pre-roll: TRAIN until that has had its share of the idle time, if the usual wait is
    long enough; then PRE_ROLL, which ends within a decoding step of the wait.
    """
    trains = section.train_drafter and view.samples_available > 0
    if view.steps < section.min_steps_per_window and trains:
        return Action.TRAIN
    if view.is_over:
        return Action.STOP
    if view.seconds_idle < section.min_tail_seconds:
        return Action.WAIT
    if view.can_pre_roll:
        is_due = view.training_share < TRAINING_SHARE and view.step_seconds <= view.usual_seconds
        return Action.TRAIN if trains and is_due else Action.PRE_ROLL
    return Action.TRAIN if trains and view.seconds_idle >= view.step_seconds else Action.WAIT


def tokens_left(running: np.ndarray, waiting: int, lengths: np.ndarray) -> float:
    """Tokens until a replica's last response ends, if responses are as long as `lengths` (float64, ascending) were.

    running int [B]: tokens of each running response so far. Where the longest of the running responses delays the
    replica more than the sum of all does, the result is as if all of them were that long.
    """
    mean = float(lengths.mean())
    if not len(running):
        return waiting * mean
    sums = np.concatenate((np.cumsum(lengths[::-1])[::-1], [0.0]))  # of the i-th and all longer ones
    at = np.searchsorted(lengths, running, side="right")
    longer = len(lengths) - at
    # Longer than any before: half as much again.
    residual = np.where(longer > 0, sums[at] / np.maximum(longer, 1) - running, np.maximum(running / 2, 1.0))
    return max(float(residual.sum()) + waiting * mean, float(residual.max()) * len(running))
