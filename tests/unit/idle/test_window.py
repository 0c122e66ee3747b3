"""The window's loop under a virtual clock, with a coordinator that knows when the others will be done."""

import itertools
import logging
from dataclasses import dataclass

import pytest

from megatron_tlt.config.idle import POLL_S, IdleSection
from megatron_tlt.errors import DrafterError
from megatron_tlt.idle.policy import Action
from megatron_tlt.idle.state import RankState, seconds_in
from megatron_tlt.idle.window import IdleWindow, WindowReport

BUSY, IDLE, TRAINING, PRE_ROLLING = RankState.BUSY, RankState.IDLE, RankState.TRAINING, RankState.PRE_ROLLING
STEP_S = 0.05
SECTION = IdleSection(train_drafter=True, min_tail_seconds=0.0)


@dataclass
class Clock:
    """Stands still unless a test or a sleep moves it."""

    time: float = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        assert 0.001 <= seconds <= 0.005
        self.time += seconds


@dataclass
class FakeCoordinator:
    """The others are done at `over_at`; the counter shows it then, and the barrier is complete `rounds` later."""

    clock: Clock
    over_at: float
    rounds: float = 0.0
    is_over: bool = False
    entered_at: float | None = None

    def enter_done(self) -> None:
        self.is_over, self.entered_at = False, self.clock.time

    def test_done(self) -> bool:
        assert self.entered_at is not None
        self.is_over |= self.clock.time >= self.over_at
        return self.clock.time >= self.over_at + self.rounds


@pytest.fixture
def clock():
    return Clock(10.0)


def make(coordinator, clock, section=SECTION, **more):
    options = {"clock": clock.now, "sleep": clock.sleep, "wall": clock.now}
    options["num_samples"] = lambda: 1
    return IdleWindow(coordinator, section, **{**options, **more})


def run(window, step_fn):
    """A window without a rollout."""
    window.begin()
    return window.run(step_fn)


def stepper(clock, tokens=100.0, calls=None):
    def step_fn():
        clock.time += STEP_S
        if calls is not None:
            calls.append(clock.time)
        return {"tokens": tokens, "loss": clock.time}

    return step_fn


def test_the_only_replica_takes_the_steps_that_are_due(clock):
    coordinator = FakeCoordinator(clock, over_at=clock.time)
    calls = []
    section = IdleSection(train_drafter=True, min_tail_seconds=0.0, min_steps_per_window=3)
    report = run(make(coordinator, clock, section), stepper(clock, calls=calls))
    assert report.steps == len(calls) == 3
    assert [s.state for s in report.spans] == [BUSY, IDLE, TRAINING]


def idle_seconds(report: WindowReport) -> float:
    return seconds_in(report.spans, IDLE, TRAINING, PRE_ROLLING)


def test_it_trains_until_the_last_rank_is_done_and_no_step_longer(clock):
    coordinator = FakeCoordinator(clock, over_at=13.02)
    window = make(coordinator, clock)
    window.begin()
    clock.time += 2.0  # the rollout
    calls = []
    report = window.run(stepper(clock, calls=calls))
    assert report.steps == len(calls) == 21  # 1.02 s in steps of 0.05 s
    assert report.tokens == 2100
    assert report.training_seconds == pytest.approx(21 * STEP_S)
    assert idle_seconds(report) == pytest.approx(clock.time - 12.0)
    assert 13.02 <= report.left_at <= 13.02 + STEP_S
    assert report.metrics == {"loss": pytest.approx(sum(calls) / 21)}
    assert [s.state for s in report.spans] == [BUSY, IDLE, TRAINING]
    assert (report.entered_at, report.left_at) == (12.0, clock.time)


def test_one_slow_micro_step_does_not_end_training(clock):
    """The first one builds and allocates; another may meet a busy moment."""
    seconds = iter([30.0, STEP_S, STEP_S, 30.0])

    def step():
        clock.time += next(seconds, STEP_S)
        return {"tokens": 1.0}

    window, steps = make(None, clock), []
    for start in (100.0, 200.0, 300.0, 400.0):
        clock.time = start
        window.coordinator = FakeCoordinator(clock, over_at=start + 1.0)
        window.begin()
        steps.append(window.run(step).steps)
    assert steps[0] == 1 and steps[1] > 2 and min(steps[2:]) > 10


def test_a_part_of_the_idle_time_is_trained_in_and_the_rest_pre_rolls(clock):
    """The first window shows how long windows are and what a micro-step takes; with prompts used up it trains again."""
    ends = iter((13.0, 23.0, 32.5))

    def pre_roll(until):
        end = next(ends)
        while not until() and clock.time < end:
            clock.time += 0.01
        return 70

    coordinator = FakeCoordinator(clock, over_at=13.0)
    window = make(coordinator, clock)
    spans = []
    for start, over in ((10.0, 13.0), (20.0, 23.0), (30.0, 33.0)):
        clock.time, coordinator.over_at = start, over
        window.begin()
        clock.time += 2.0  # the rollout
        report = window.run(stepper(clock), pre_roll)
        spans.append([s.state for s in report.spans])
        assert over <= report.left_at <= over + STEP_S and report.pre_rolled_tokens == 70
        assert idle_seconds(report) == pytest.approx(clock.time - start - 2.0)
        trained, pre_rolled = report.training_seconds, report.pre_rolling_seconds
        expected = {10.0: (STEP_S, 0.9), 20.0: (0.3, 0.7), 30.0: (0.25 + 0.5, 0.25)}[start]
        assert (trained, pre_rolled) == pytest.approx(expected, abs=0.12), start
    assert spans == [[BUSY, IDLE, TRAINING, PRE_ROLLING]] * 2 + [[BUSY, IDLE, TRAINING, PRE_ROLLING, TRAINING]]


def test_windows_that_become_shorter_are_trained_in_before_long(clock):
    """Long ones without prompts left are all training, more than a quarter of many short ones behind them."""
    coordinator = FakeCoordinator(clock, over_at=0.0)
    window = make(coordinator, clock)

    def pre_roll(until):
        while not until():
            clock.time += 0.01
        return 1

    for seconds, call in ((5.0, None), (5.0, None), *[(1.0, pre_roll)] * 20):
        coordinator.over_at = clock.time + seconds
        window.begin()
        report = window.run(stepper(clock), call)
    assert [s.state for s in report.spans] == [BUSY, IDLE, TRAINING, PRE_ROLLING]


def test_a_wait_shorter_than_a_micro_step_is_not_trained_in(clock):
    coordinator = FakeCoordinator(clock, over_at=clock.time + 1.0)
    window = make(coordinator, clock)
    assert run(window, stepper(clock)).steps == 20
    coordinator.over_at = clock.time + 0.9 * STEP_S
    assert run(window, stepper(clock)).steps == 0
    coordinator.over_at = clock.time + 2.5 * STEP_S
    assert run(window, stepper(clock)).steps == 2


def test_long_waits_for_environments_are_trained_in(clock):
    """In the rollout, before the window, whose least micro-steps follow all the same."""
    section = IdleSection(train_drafter=True, min_tail_seconds=0.1, min_steps_per_window=3)
    window = make(FakeCoordinator(clock, over_at=clock.time), clock, section)
    window.begin()
    step = stepper(clock)
    assert [window.train_while_parked(step, seconds) for seconds in (0.0, 0.09, 0.1, 0.2)] == [False] * 2 + [True] * 2
    assert not window.train_while_parked(lambda: None, 1.0)  # nothing to train on yet
    report = window.run(step)
    assert (report.steps, report.tokens) == (5, 500)
    assert report.parked_training_seconds == pytest.approx(2 * STEP_S)
    assert report.training_seconds == pytest.approx(3 * STEP_S) and idle_seconds(report) >= 3 * STEP_S
    assert run(window, step).parked_training_seconds == 0.0


def test_spans_fill_the_phase_and_go_to_the_sink_in_wall_time(clock):
    sink = []
    window = make(FakeCoordinator(clock, over_at=11.12), clock, on_span=lambda *span: sink.append(span))
    window.begin()
    clock.time += 1.0
    report = window.run(stepper(clock))
    assert [s.state for s in report.spans] == [BUSY, IDLE, TRAINING]
    assert all(a.end == b.start for a, b in itertools.pairwise(report.spans))
    assert (report.spans[0].start, report.spans[-1].end) == (10.0, clock.time)
    assert sink == [(s.state.name, s.start, s.seconds) for s in report.spans]
    assert report.steps == 3


def test_a_failed_drafter_is_warned_of_once_and_windows_go_on(clock, caplog):
    calls = []

    def step_fn():
        calls.append(clock.time)
        clock.time += STEP_S
        if len(calls) == 1:
            raise DrafterError("loss is nan in micro-step 3")

    window = make(FakeCoordinator(clock, over_at=11.0), clock)
    with caplog.at_level(logging.WARNING):
        for over_at in (11.0, 13.0):
            window.coordinator.over_at = over_at
            report = run(window, step_fn)
            assert report.left_at >= over_at
    assert len(calls) == 2, "once a window"
    assert len(caplog.records) == 1
    assert "off for the rest of the run: loss is nan" in caplog.text
    assert report.steps == 0 and report.metrics == {}


def test_samples_are_counted_before_a_step(clock):
    counts = iter([0] * 50 + [5] * 10_000)
    window = make(FakeCoordinator(clock, over_at=11.0), clock, num_samples=lambda: next(counts))
    calls = []
    run(window, stepper(clock, calls=calls))
    assert calls[0] == pytest.approx(10.0 + 50 * POLL_S + STEP_S)


def test_the_leader_of_a_group_decides(clock):
    """This rank is the second: its own view (all done, nothing to train) does not matter."""
    script = [Action.WAIT, Action.TRAIN, Action.TRAIN, Action.STOP]
    proposals = []

    def agree(value):
        proposals.append(value)
        return max(value, script[len(proposals) - 1])

    coordinator = FakeCoordinator(clock, over_at=5.0)
    window = make(coordinator, clock, is_group_leader=False, agree=agree)
    report = run(window, stepper(clock))
    assert proposals == [Action.WAIT] * 4
    assert report.steps == 2
