"""The idle window of one rank: from its own replica running dry to every replica being done.

    rank 0   rollout ===============================| out
    rank 1   rollout =========|look|step|look|step|st| out      look: is it over? is a step worth it?
    rank 2   rollout ============|look|zz|look|zz|look| out      zz:   sleep 1-5 ms
                              ^ enters the done barrier            nobody waits inside MPI

`step_fn` is handed in: this file does not know what is trained. The ranks of one replica go through the same looks
together, because a micro-step may hold collectives among them: the first one decides, `Unit.agree` tells the others.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from megatron_tlt.errors import DrafterError
from megatron_tlt.idle.policy import Action, IdlePolicy, IdleView
from megatron_tlt.idle.state import MonotonicClock, RankState, StateSpan, StateTracker, seconds_in
from megatron_tlt.observe.clock import wall_seconds

if TYPE_CHECKING:
    from megatron_tlt.idle.messages import RequestRange
    from megatron_tlt.interfaces import Clock

TOKENS = "tokens"
_EMA = 0.2
_log = logging.getLogger(__name__)

StepFn = Callable[[], Mapping[str, float] | None]
"""One micro-step: its metrics, `tokens` (trained on) among them, or None when there is nothing to train on."""
SpanSink = Callable[[str, float, float], None]
"""Takes a span: the state's name, its start as wall time, its seconds."""


class Coordinator(Protocol):
    """The part of `IdleCoordinator` that a window uses."""

    entered_at: float
    last_done_at: float | None

    @property
    def is_over(self) -> bool: ...
    def begin(self) -> None: ...
    def progress(
        self, running: int, tokens_left: float, tokens_per_second: float, queued: int = 0
    ) -> None: ...
    def ask_for_work(self) -> None: ...
    def given_work(self) -> Sequence[RequestRange] | None: ...
    def enter_done(self) -> None: ...
    def tell(self, state: RankState, steps: int = 0) -> None: ...
    def count_steps(self, steps: int) -> None: ...
    def all_done(self) -> bool: ...
    def expected_tail(self) -> float | None: ...
    def check_alive(self, silent_seconds: float) -> None: ...


class SoloCoordinator:
    """The coordinator of a world of one rank: whoever is done, everyone is done."""

    is_over = True

    def __init__(self) -> None:
        self.entered_at = 0.0
        self.last_done_at: float | None = None

    def begin(self) -> None:
        """Nobody to tell."""

    def progress(self, running: int, tokens_left: float, tokens_per_second: float, queued: int = 0) -> None:
        """Nobody to tell."""

    def ask_for_work(self) -> None:
        """Nobody to ask."""

    def given_work(self) -> Sequence[RequestRange] | None:
        """Nothing."""
        return ()

    def enter_done(self) -> None:
        """Notes the time."""
        self.entered_at = self.last_done_at = wall_seconds()

    def tell(self, state: RankState, steps: int = 0) -> None:
        """Nobody to tell."""

    def count_steps(self, steps: int) -> None:
        """Nobody to tell."""

    def all_done(self) -> bool:
        """At once."""
        return True

    def expected_tail(self) -> float | None:
        """None left."""
        return 0.0

    def check_alive(self, silent_seconds: float) -> None:
        """Nobody to miss."""


def _same(value: int) -> int:
    return value


@dataclass(frozen=True)
class Unit:
    """The ranks of one replica as one: they train together or not at all."""

    is_first: bool = True
    """Whether this rank decides for the others."""
    agree: Callable[[int], int] = _same
    """The highest of all ranks' proposals, on every rank; collective among the unit (`tensor_parallel.agree_on`)."""


@dataclass(frozen=True)
class WindowReport:
    """What one rank did in one window. Wall times are seconds since 1970, to be compared across ranks."""

    spans: tuple[StateSpan, ...]
    """The rollout phase by state, BUSY first, without gaps (seconds of the window's clock)."""
    idle_seconds: float
    """From running dry to leaving, training or not."""
    training_seconds: float
    """Of that, inside micro-steps: recovered."""
    steps: int
    """Micro-steps."""
    tokens: int
    """Tokens trained on."""
    entered_at: float
    """Wall time at which this rank ran dry."""
    left_at: float
    """Wall time at which it left the window."""
    last_done_at: float | None
    """Wall time at which the last rank ran dry, where somebody said so (OVER); see `stop_latency` for the exact way."""
    disabled_reason: str | None = None
    """Why training is off for the rest of the run; None: it is not."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means of the micro-steps' metrics, `tokens` left out."""

    @property
    def stop_seconds(self) -> float | None:
        """From the last rank's running dry to this one's leaving; None where nobody said when that was."""
        return None if self.last_done_at is None else self.left_at - self.last_done_at


def stop_latency(entered_at: Sequence[float], left_at: Sequence[float]) -> float:
    """Seconds from last-done to all-stopped of one window, from all ranks' reports.

    Ranks do not gather this in the window: the step's metrics are gathered anyway. Hosts' clocks must agree.
    """
    return max(left_at) - max(entered_at)


class IdleWindow:
    """Runs the idle windows of one rank. Mutates its own averages and the coordinator."""

    def __init__(
        self,
        coordinator: Coordinator,
        policy: IdlePolicy,
        *,
        clock: Clock | None = None,
        unit: Unit | None = None,
        samples: Callable[[], int] | None = None,
        on_span: SpanSink | None = None,
        on_look: Callable[[str], None] | None = None,
        sleep: Callable[[float], None] = time.sleep,
        wall: Callable[[], float] = wall_seconds,
        poll_seconds: float = 0.002,
        silent_seconds: float = 600.0,
    ):
        """`samples` counts the sequences there are to train on; ranks silent for `silent_seconds` end the job.

        `on_look` is told the state at every look: a sign of life.
        """
        self.coordinator, self.policy = coordinator, policy
        self.disabled_reason: str | None = None
        self._clock, self._unit = clock or MonotonicClock(), unit or Unit()
        self._samples, self._on_span, self._on_look = samples, on_span, on_look
        self._sleep, self._wall = sleep, wall
        self._poll, self._silent = poll_seconds, silent_seconds
        self._micro_step: float | None = None
        self._tracker: StateTracker | None = None
        self._failed: str | None = None

    def begin(self) -> None:
        """The rollout phase begins: opens the window, BUSY. Raises CoordinatorError while one is open."""
        self.coordinator.begin()
        self._tracker = StateTracker(self._clock)
        self._started_at = self._wall()

    def disable(self, reason: str) -> None:
        """Turns training off for the rest of the run, with one warning. A second call does nothing."""
        if self.disabled_reason is None:
            self.disabled_reason = reason
            _log.warning("drafter training is off for the rest of the run: %s", reason)

    def take_over(self) -> Sequence[RequestRange]:
        """This replica has no request left: those of others that it was given, after which it is BUSY again; none when
        no replica has a queue any more. Sleeps meanwhile: this takes a step of an engine.
        """
        assert self._tracker is not None, "take_over needs begin before it"
        self.coordinator.ask_for_work()
        self._tracker.to(RankState.IDLE)
        while (pieces := self.coordinator.given_work()) is None:
            self._say_alive()
            self._sleep(self._poll)
        if pieces:
            self._tracker.to(RankState.BUSY)
        return pieces

    def run(self, step_fn: StepFn) -> WindowReport:
        """Trains or sleeps until every rank is done. Call it when this replica has no request left.

        A DrafterError of `step_fn` turns training off, here and on the other ranks of the unit; any other error
        passes through.
        """
        if self._tracker is None:
            self.begin()
        assert self._tracker is not None
        tally = _Tally(self._clock.now())
        self.coordinator.enter_done()
        if self._tracker.state is RankState.BUSY:
            self._tracker.to(RankState.IDLE)
        while (action := self._look(tally)) is not Action.STOP:
            if action is Action.TRAIN:
                self._enter(RankState.TRAINING, tally)
                self._train_one(step_fn, tally)
                continue
            if action is Action.DISABLE:
                self._unit_failed()
            self._enter(RankState.IDLE, tally)
            self._sleep(self._poll)
        while not self.coordinator.all_done():  # told that it is over: the barrier's last rounds
            self._sleep(self._poll)
            self.coordinator.check_alive(self._silent)
        return self._finish(tally)

    def _unit_failed(self) -> None:
        """The rank that failed warns; the others of its unit stop as quietly as they would have gone on."""
        if self._failed is not None:
            self.disable(self._failed)
        elif self.disabled_reason is None:
            self.disabled_reason = "training failed on another rank of this replica"

    def _look(self, tally: _Tally) -> Action:
        """What the unit does next. Collective among the unit."""
        self.coordinator.all_done()  # polls, too
        self._say_alive()
        proposal = Action.WAIT
        if self._failed is not None and self.disabled_reason is None:
            proposal = Action.DISABLE
        elif self._unit.is_first:
            proposal = self.policy.decide(self._view(tally)).action
        return Action(self._unit.agree(proposal))

    def _say_alive(self) -> None:
        """A look at the others: this rank is alive, and so must they be."""
        if self._on_look is not None and self._tracker is not None:
            self._on_look(self._tracker.state.name)
        self.coordinator.check_alive(self._silent)

    def _view(self, tally: _Tally) -> IdleView:
        assert self._tracker is not None
        return IdleView(
            state=self._tracker.state,
            seconds_idle=self._clock.now() - tally.idle_since,
            is_over=self.coordinator.is_over,
            is_disabled=self.disabled_reason is not None,
            expected_tail=self.coordinator.expected_tail(),
            micro_step_seconds=self._micro_step,
            samples_available=self._available(tally),
            steps=tally.steps,
        )

    def _available(self, tally: _Tally) -> int | None:
        """Nothing new comes in while this replica is dry: what ran out stays out until the window ends."""
        if tally.is_starved:
            return 0
        return None if self._samples is None else self._samples()

    def _enter(self, state: RankState, tally: _Tally) -> None:
        assert self._tracker is not None
        if self._tracker.state is not state:
            self._tracker.to(state)
            self.coordinator.tell(state, tally.steps)

    def _train_one(self, step_fn: StepFn, tally: _Tally) -> None:
        started = self._clock.now()
        try:
            metrics = step_fn()
        except DrafterError as error:
            self._failed = str(error)
            return
        seconds = self._clock.now() - started
        if metrics is None:
            tally.is_starved = True
            return
        tally.add(metrics, seconds)
        self.coordinator.count_steps(tally.steps)
        old = self._micro_step
        self._micro_step = seconds if old is None else old + _EMA * (seconds - old)

    def _finish(self, tally: _Tally) -> WindowReport:
        assert self._tracker is not None
        self._tracker.to(RankState.BUSY)
        *spans, _ = self._tracker.finish()  # without the BUSY of no length that closes it
        self._tracker = None
        origin = spans[0].start
        if self._on_span is not None:
            for span in spans:
                self._on_span(span.state.name, self._started_at + span.start - origin, span.seconds)
        return WindowReport(
            spans=tuple(spans),
            idle_seconds=seconds_in(tuple(spans), RankState.IDLE, RankState.TRAINING),
            training_seconds=tally.seconds,
            steps=tally.steps,
            tokens=tally.tokens,
            entered_at=self.coordinator.entered_at,
            left_at=self._wall(),
            last_done_at=self.coordinator.last_done_at,
            disabled_reason=self.disabled_reason,
            metrics=tally.means(),
        )


@dataclass
class _Tally:
    """Sums of one window."""

    idle_since: float
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    is_starved: bool = False
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, metrics: Mapping[str, float], seconds: float) -> None:
        """Counts a micro-step."""
        self.steps += 1
        self.seconds += seconds
        self.tokens += int(metrics.get(TOKENS, 0))
        for name, value in metrics.items():
            if name != TOKENS:
                self.sums[name] += value

    def means(self) -> dict[str, float]:
        """Mean of each metric over the micro-steps."""
        return {name: total / self.steps for name, total in self.sums.items()}
