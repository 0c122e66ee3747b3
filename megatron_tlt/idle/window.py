"""The idle window of one rank: from its own replica having no request left until all replicas are done.

    rank 0   rollout ===============================| out      (the slowest: waits for no rank)
    rank 1   rollout =========|poll|step|poll|step|st| out     poll: is it over?
    rank 2   rollout ============|poll|zz|poll|zz|poll| out    zz:   sleep `POLL_S`
    rank 3   rollout ===|poll|pre-rollout ~~~~~~~|step| out    ~:    a decoding step of the next prompts, poll
                              ^ enters the done barrier

Who waits for whom: every rank for the slowest replica, by polling between micro-steps or sleeps; no call blocks in MPI.
The ranks of a tensor-parallel group take every decision together, because a micro-step may hold collectives of the
group: its leader decides, and `agree`, a collective of the group, gives all of its ranks the highest proposal.

`step_fn` and `pre_roll` are passed in: this module does not depend on what is trained or decoded.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING

from megatron_tlt.config.idle import POLL_S, IdleSection
from megatron_tlt.errors import DrafterError
from megatron_tlt.idle.policy import Action, IdleView, RecentWindows, decide
from megatron_tlt.idle.state import RankState, StateSpan, StateTracker, seconds_in
from megatron_tlt.observe.clock import wall_seconds

if TYPE_CHECKING:
    from megatron_tlt.idle.coordinator import IdleCoordinator

TOKENS = "tokens"
_log = logging.getLogger(__name__)
_RECENT_STEPS = 5  # micro-steps, whose median is a usual one

StepFn = Callable[[], Mapping[str, float] | None]
"""One micro-step: its metrics, `tokens` (trained on) among them, or None when there is nothing to train on."""
PreRoll = Callable[[Callable[[], bool]], int]
"""Decodes the next two steps' prompts until its argument, asked between two decoding steps, is true; returns how many
tokens.
"""


@dataclass(frozen=True)
class WindowReport:
    """One rank's record of one window. Wall times are seconds since 1970, to be compared across ranks."""

    spans: tuple[StateSpan, ...]
    """The rollout phase by state, BUSY first, without gaps (seconds of the window's clock)."""
    training_seconds: float
    """Of all but BUSY, those inside micro-steps: recovered."""
    parked_training_seconds: float
    """In micro-steps before it, while every request of this replica waited for its environment."""
    steps: int
    """Micro-steps, also of those waits."""
    tokens: int
    """Tokens trained on."""
    entered_at: float
    """Wall time at which this rank had its last request."""
    left_at: float
    """Wall time at which it left the window."""
    pre_rolling_seconds: float = 0.0
    """Of the idle seconds, in pre-rollouts."""
    pre_rolled_tokens: int = 0
    """Decoded in them."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means of the micro-steps' metrics, `tokens` left out."""


class IdleWindow:
    """Runs the idle windows of one rank, one a rollout. Mutates the coordinator."""

    def __init__(
        self,
        coordinator: IdleCoordinator,
        section: IdleSection,
        *,
        is_group_leader: bool = True,
        agree: Callable[[int], int] = lambda value: value,
        num_samples: Callable[[], int],
        on_span: Callable[[str, float, float], None] | None = None,
        on_poll: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        wall: Callable[[], float] = wall_seconds,
    ):
        """`num_samples()`: sequences there are to train on.

        `on_span(state, wall time of its start, seconds)` is called at the end of a window, `on_poll(state)` at every
        poll.
        """
        self.coordinator, self._section = coordinator, section
        self._is_group_leader, self._agree = is_group_leader, agree
        self._num_samples, self._on_span, self._on_poll = num_samples, on_span, on_poll
        self._clock, self._sleep, self._wall = clock, sleep, wall
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)  # of the last micro-steps
        self._is_warm = False  # whether there was one: the first builds and allocates much, and is no measure
        self._recent = RecentWindows()
        self.begin()

    def begin(self) -> None:
        """The rollout phase begins, BUSY."""
        self._tracker = StateTracker(self._clock)
        self._began_at = self._wall()
        self._sums = _Sums()

    def run(self, step_fn: StepFn, pre_roll: PreRoll | None = None) -> WindowReport:
        """Trains, pre-rolls once or sleeps until every rank is done. After `begin`, without a request left.

        A DrafterError of `step_fn` is logged: `step_fn` must return None from then on. Any other error passes through.
        """
        sums = self._sums
        sums.idle_since = self._clock()
        sums.parked_seconds, sums.parked_steps = sums.seconds, sums.steps
        sums.has_no_samples = False
        sums.can_pre_roll = pre_roll is not None
        self.coordinator.enter_done()
        self._tracker.to(RankState.IDLE)
        while (action := self._next_action(sums)) is not Action.STOP:
            if action is Action.TRAIN:
                self._tracker.to(RankState.TRAINING)
                self._train_one(step_fn, sums)
                continue
            if action is Action.PRE_ROLL:
                assert pre_roll is not None
                self._tracker.to(RankState.PRE_ROLLING)
                sums.can_pre_roll = False
                sums.pre_rolled_tokens += pre_roll(self._is_over)
                continue
            self._tracker.to(RankState.IDLE)
            self._sleep(POLL_S)
        while not self.coordinator.test_done():  # it is over: the barrier's last rounds
            self._sleep(POLL_S)
            self._show_state()
        return self._finish(sums)

    def train_while_parked(self, step_fn: StepFn, seconds: float) -> bool:
        """A micro-step in the rollout, where all requests of this replica have waited `seconds` for their environments.

        Returns whether the policy took one. Collective among the group; errors as in `run`.
        """
        sums = self._sums
        # More samples may come, and the least steps of a window are not due yet.
        sums.has_no_samples = False
        view = replace(self._view(sums), seconds_idle=seconds, is_over=False, steps=self._section.min_steps_per_window)
        action, done = self._agreed(view), sums.steps
        if action is Action.TRAIN:
            self._train_one(step_fn, sums)
        return sums.steps > done

    def _is_over(self) -> bool:
        """Polls; whether every replica is done."""
        self.coordinator.test_done()
        return self.coordinator.is_over

    def _next_action(self, sums: _Sums) -> Action:
        """Polls; returns the group's next action. Collective among the group."""
        self.coordinator.test_done()
        self._show_state()
        return self._agreed(self._view(sums))

    def _agreed(self, view: IdleView) -> Action:
        """The group's next action. Collective among the group."""
        return Action(self._agree(decide(self._section, view) if self._is_group_leader else Action.WAIT))

    def _show_state(self) -> None:
        if self._on_poll is not None:
            self._on_poll(self._tracker.state.name)

    def _view(self, sums: _Sums) -> IdleView:
        seconds_idle = self._clock() - sums.idle_since
        return IdleView(
            seconds_idle=seconds_idle,
            is_over=self.coordinator.is_over,
            # An idle replica gets no new samples: without any, none come before the window ends.
            samples_available=0 if sums.has_no_samples else self._num_samples(),
            steps=sums.steps - sums.parked_steps,
            step_seconds=median(self._step_seconds) if self._step_seconds else 0.0,
            can_pre_roll=sums.can_pre_roll,
            training_share=self._recent.training_share(seconds_idle, sums.trained),
            usual_seconds=self._recent.usual_seconds,
        )

    def _train_one(self, step_fn: StepFn, sums: _Sums) -> None:
        started = self._clock()
        try:
            metrics = step_fn()
        except DrafterError as error:
            _log.warning("drafter training is off for the rest of the run: %s", error)
            metrics = None
        seconds = self._clock() - started
        if metrics is None:
            sums.has_no_samples = True
            return
        if self._is_warm:
            self._step_seconds.append(seconds)
        self._is_warm = True
        sums.add(metrics, seconds)

    def _finish(self, sums: _Sums) -> WindowReport:
        self._tracker.to(RankState.BUSY)
        spans = self._tracker.finish()[:-1]  # without the BUSY of no length that closes the phase
        idle = seconds_in(spans, RankState.IDLE, RankState.TRAINING, RankState.PRE_ROLLING)
        self._recent.add(idle, sums.trained)
        if self._on_span is not None:
            for span in spans:
                self._on_span(span.state.name, self._began_at + span.start - spans[0].start, span.seconds)
        return WindowReport(
            spans=spans,
            training_seconds=sums.trained,
            parked_training_seconds=sums.parked_seconds,
            steps=sums.steps,
            tokens=sums.tokens,
            entered_at=self.coordinator.entered_at,
            left_at=self._wall(),
            pre_rolling_seconds=seconds_in(spans, RankState.PRE_ROLLING),
            pre_rolled_tokens=sums.pre_rolled_tokens,
            metrics=sums.means(),
        )


@dataclass
class _Sums:
    """Sums of one window and of the rollout before it."""

    idle_since: float = 0.0
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    parked_steps: int = 0  # of `steps`, before the window
    parked_seconds: float = 0.0  # of `seconds`, before the window
    has_no_samples: bool = False
    can_pre_roll: bool = False
    pre_rolled_tokens: int = 0
    metrics: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def trained(self) -> float:
        """Seconds of the window's own micro-steps."""
        return self.seconds - self.parked_seconds

    def add(self, metrics: Mapping[str, float], seconds: float) -> None:
        """Counts a micro-step."""
        self.steps += 1
        self.seconds += seconds
        self.tokens += int(metrics.get(TOKENS, 0))
        for name, value in metrics.items():
            if name != TOKENS:
                self.metrics[name] += value

    def means(self) -> dict[str, float]:
        """Mean of each metric over the micro-steps."""
        return {name: total / self.steps for name, total in self.metrics.items()}
