"""Who trains, when to stop, and whether the wait is worth it. Pure: no clock, no torch, no MPI.

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
    """What an idle rank does next. Ordered: where ranks of a unit propose several, the highest counts."""

    WAIT = 0
    TRAIN = 1
    STOP = 2
    DISABLE = 3
    """Training has failed on a rank of the unit; no policy decides this."""


@dataclass(frozen=True, slots=True)
class BusyReplica:
    """A replica that still has requests, as the status board knows it."""

    tokens_left: float
    """Tokens still expected until its last request ends."""
    tokens_per_second: float
    """How fast it makes them; 0: not known."""
    age_seconds: float = 0.0
    """How old these figures are."""


@dataclass(frozen=True, slots=True)
class IdleView:
    """All that a decision depends on."""

    state: RankState
    """This rank's own state."""
    seconds_idle: float
    """Since the replica ran dry."""
    is_over: bool = False
    """Every rank is done."""
    is_disabled: bool = False
    """Training has failed in this run."""
    expected_tail: float | None = None
    """Seconds until the slowest replica is expected to be done; negative: overdue by so much; None: not known."""
    micro_step_seconds: float | None = None
    """Moving average of a micro-step; None before the first."""
    samples_available: int | None = None
    """Sequences to train on; None: not known."""
    steps: int = 0
    """Micro-steps of this window."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, and why, for people."""

    action: Action
    reason: str


@dataclass(frozen=True, slots=True)
class IdlePolicy:
    """Decides for one idle replica; every rank may have its own without harm to the others."""

    train_drafter: bool = True
    """Train at all."""
    min_tail_seconds: float = 0.05
    """Shortest wait that is trained in."""
    max_steps_per_window: int = 0
    """Most micro-steps of one window; 0: no limit."""
    min_samples: int = 1
    """Fewest sequences worth training on."""

    @classmethod
    def of(cls, section: IdleSection) -> IdlePolicy:
        """The policy that a configuration asks for."""
        return cls(
            section.train_drafter, section.min_tail_seconds, section.max_steps_per_window, section.min_samples
        )

    def decide(self, view: IdleView) -> Decision:
        """STOP when every rank is done; TRAIN where a micro-step is possible and worth it; else WAIT."""
        if view.is_over:
            return Decision(Action.STOP, "every rank is done")
        reason = self._why_not(view) or self._why_not_worth_it(view)
        if reason is not None:
            return Decision(Action.WAIT, reason)
        return Decision(Action.TRAIN, "the slowest replica is not expected to be done soon")

    def _why_not(self, view: IdleView) -> str | None:
        """Why this rank cannot train, however long the wait."""
        if view.state is RankState.BUSY:
            return "this replica has requests of its own"
        if not self.train_drafter:
            return "training in idle time is off"
        if view.is_disabled:
            return "training has failed in this run"
        if self.max_steps_per_window and view.steps >= self.max_steps_per_window:
            return f"{view.steps} micro-steps were done, the most for one window"
        if view.samples_available is not None and view.samples_available < self.min_samples:
            return f"{view.samples_available} sequences to train on, {self.min_samples} are needed"
        return None

    def _why_not_worth_it(self, view: IdleView) -> str | None:
        """Why the wait is too short.

        An expectation counts while it is within one micro-step (or `min_tail_seconds`) of its time, before or after:
        a step begun there would make everybody wait for this rank. One that is overdue by more has proven wrong
        and counts as none. Without any, a wait that has lasted `min_tail_seconds` is taken to last as long again.
        """
        least = max(self.min_tail_seconds, view.micro_step_seconds or 0.0)
        tail = view.expected_tail
        if tail is not None and tail > -least:
            return None if tail >= least else f"the wait is expected to end in {tail:.3f} s"
        if view.seconds_idle < self.min_tail_seconds:
            return "the wait may be short"
        return None


def expected_tail(busy: Iterable[BusyReplica]) -> float | None:
    """Seconds until the slowest of `busy` is expected to be done: max of tokens_left / tokens_per_second - age.

    Negative when all are overdue; 0 when nobody is busy; None as soon as one of them is not known.
    """
    tails = []
    for replica in busy:
        if replica.tokens_per_second <= 0:
            return None
        tails.append(replica.tokens_left / replica.tokens_per_second - replica.age_seconds)
    return max(tails, default=0.0)


def share_of_queue(queued: int, running: int) -> int:
    """Requests of its queue that a busy replica gives to a dry one.

    As many as let both end about together, with running answers half done on average: (queued + running / 2) / 2.
    """
    return min(queued, -(-(2 * queued + running) // 4))


def tokens_left(running: np.ndarray, waiting: int, lengths: np.ndarray) -> float:
    """Tokens until a replica's last answer ends, if answers are as long as `lengths` (ascending) were.

    Where its answers run side by side, the longest of them may hold it up more than their sum does: then it is as if
    all of them were that long. running int [B], tokens of each running answer so far.
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


def has_changed(told: float, now: float, share: float, floor: float) -> bool:
    """Whether a figure moved by `share` of what was told last; below `floor` by that share of `floor`."""
    return abs(now - told) >= share * max(abs(told), floor)
