"""When an idle rank trains, when it stops, and how many requests it steals. Pure: no clock, no torch, no MPI.

The simulator runs this file as it is, so everything it needs comes in as values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from megatron_tlt.idle.state import RankState

if TYPE_CHECKING:
    from megatron_tlt.config.idle import IdleSection


class Action(IntEnum):
    """What an idle rank does next. Ordered: of several proposals in a tensor-parallel group the highest counts."""

    WAIT = 0
    TRAIN = 1
    STOP = 2
    DISABLE = 3
    """Training has failed on a rank of the group; `IdlePolicy` never returns this."""


@dataclass(frozen=True, slots=True)
class BusyReplica:
    """A replica that still has requests, as the status board has it."""

    tokens_left: float
    """Tokens still expected until its last request ends."""
    tokens_per_second: float
    """Its speed; 0: not known."""
    age_seconds: float = 0.0
    """Age of these figures."""


@dataclass(frozen=True, slots=True)
class IdleView:
    """All that a decision depends on."""

    state: RankState
    """This rank's own state."""
    seconds_idle: float
    """Since the replica had its last request."""
    is_over: bool = False
    """Every rank is done."""
    is_disabled: bool = False
    """Training has failed in this run."""
    expected_wait: float | None = None
    """Seconds until the slowest replica is expected to be done; negative: overdue by so much; None: not known."""
    micro_step_seconds: float | None = None
    """Moving average of a micro-step; None before the first."""
    samples_available: int | None = None
    """Sequences to train on; None: not known."""
    steps: int = 0
    """Micro-steps of this window."""


@dataclass(frozen=True, slots=True)
class IdlePolicy:
    """Decides for one idle replica. Replicas need not agree: each may have its own settings."""

    train_drafter: bool = True
    """Train at all."""
    min_tail_seconds: float = 0.05
    """Shortest wait that is trained in."""
    min_steps_per_window: int = 0
    """Micro-steps of one window even where no rank is waited for."""

    @classmethod
    def of(cls, section: IdleSection) -> IdlePolicy:
        """The policy of a configuration."""
        return cls(section.train_drafter, section.min_tail_seconds, section.min_steps_per_window)

    def decide(self, view: IdleView) -> Action:
        """TRAIN where a micro-step is possible and due, or worth it; STOP when every rank is done; else WAIT."""
        if view.steps < self.min_steps_per_window and self._can_train(view):
            return Action.TRAIN
        if view.is_over:
            return Action.STOP
        is_worth_it = self._can_train(view) and self._is_wait_long_enough(view)
        return Action.TRAIN if is_worth_it else Action.WAIT

    def _can_train(self, view: IdleView) -> bool:
        """Whether this rank can train at all, however long the wait."""
        if view.state is RankState.BUSY or not self.train_drafter or view.is_disabled:
            return False
        return view.samples_available is None or view.samples_available > 0

    def _is_wait_long_enough(self, view: IdleView) -> bool:
        """Whether a micro-step is expected to end before the wait does.

        An expectation counts while it is within one micro-step (or `min_tail_seconds`) of its time, before or after:
        a step begun there would delay every rank. One that is overdue by more has proven wrong and counts as none.
        Without any, a wait that has lasted `min_tail_seconds` is taken to last as long again.
        """
        least = max(self.min_tail_seconds, view.micro_step_seconds or 0.0)
        wait = view.expected_wait
        if wait is not None and wait > -least:
            return wait >= least
        return view.seconds_idle >= self.min_tail_seconds


def expected_wait(busy: Iterable[BusyReplica]) -> float | None:
    """Seconds until the slowest of `busy` is expected to be done: max of tokens_left / tokens_per_second - age.

    Negative when all are overdue; 0 when no replica is busy; None as soon as the speed of one is not known.
    """
    waits = []
    for replica in busy:
        if replica.tokens_per_second <= 0:
            return None
        waits.append(replica.tokens_left / replica.tokens_per_second - replica.age_seconds)
    return max(waits, default=0.0)


def share_of_queue(queued: int, running: int) -> int:
    """Number of queued requests that an idle replica steals from a busy one.

    As many as let both end about together, with running answers half done on average: (queued + running / 2) / 2.
    """
    return min(queued, -(-(2 * queued + running) // 4))


def tokens_left(running: np.ndarray, waiting: int, lengths: np.ndarray) -> float:
    """Tokens until a replica's last answer ends, if answers are as long as `lengths` (float64, ascending) were.

    running int [B]: tokens of each running answer so far. Where the longest of the running answers delays the replica
    more than the sum of all does, the result is as if all of them were that long.
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


def has_changed(old: float, new: float, share: float, floor: float) -> bool:
    """Whether a figure moved by `share` of its old value; below `floor` by that share of `floor`."""
    return abs(new - old) >= share * max(abs(old), floor)
