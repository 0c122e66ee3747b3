"""When one rank's rollout is interrupted and steps are dropped; real ranks are in tests/integration/test_stop.py."""

from types import SimpleNamespace

import pytest

from megatron_tlt.config.run import ShutdownSection
from megatron_tlt.errors import BackendError
from megatron_tlt.resilience.shutdown import GracefulExit, GracefulShutdown, RolloutInterrupted
from megatron_tlt.resilience.signals import ECHO_S, TERM, WARNING, StopSignals
from megatron_tlt.types import GenerateCall, SamplingParams
from tests.unit.resilience.test_signals import Clock


class Store(dict):
    """The calls of a torch store that are used, in a dictionary."""

    def append(self, key, value):
        self[key] = self.get(key, b"") + value.encode()

    def check(self, keys):
        return all(key in self for key in keys)


@pytest.fixture
def clock():
    return Clock(50.0)


def make(clock, store=None, **options):
    """A GracefulShutdown with its signals. With a store it is one of two ranks, else the only one."""
    signals = StopSignals(clock, exit_now=lambda code: None)
    world = SimpleNamespace(size=1 if store is None else 2, store=store, is_main=True)
    section = ShutdownSection(warning_s=100, term_s=20, save_s=10)
    return GracefulShutdown(world, section, signals, clock=clock, **options), signals


def finish_step(stop, clock, rest, update):
    """A step that takes `rest` seconds from the rollout's end, of which `update` are the update."""
    stop.sync("rollout")
    clock.now += rest - update
    stop.sync("update")
    clock.now += update
    stop.sync_after_step()


def test_a_rollout_goes_on_as_long_as_the_rest_of_the_step_fits(clock):
    stop, signals = make(clock)
    finish_step(stop, clock, rest=30, update=20)
    signals.note(WARNING)
    clock.now += 100 - 10 - 30  # all but the checkpoint and the rest of the step, as measured
    stop.check_rollout()
    clock.now += 0.1
    with pytest.raises(RolloutInterrupted):
        stop.check_rollout()


@pytest.mark.parametrize("scoring_s", [10, 16])
def test_an_update_is_begun_only_if_it_fits(clock, scoring_s):
    """After 16 s 29 are left: 20 and the checkpoint's 10 do not fit."""
    stop, signals = make(clock)
    finish_step(stop, clock, rest=30, update=20)
    signals.note(WARNING)
    clock.now += 55
    stop.sync("rollout")
    clock.now += scoring_s
    fits = scoring_s == 10

    def finish():
        stop.sync("update")
        clock.now += 20
        stop.sync_after_step()

    with pytest.raises(GracefulExit, match="between two steps" if fits else "dropped"):
        finish()
    assert stop.has_dropped_step != fits


def test_an_update_or_a_part_without_looks_that_the_warning_is_too_short_for_is_named_once(clock, caplog):
    stop, _ = make(clock)

    def score(seconds):
        with stop.unwatched("scoring"):
            clock.now += seconds

    finish_step(stop, clock, rest=95, update=90)
    score(90)
    assert not caplog.text, "100 s are enough for it and for a checkpoint"
    for _ in range(2):
        finish_step(stop, clock, rest=200, update=190)
        score(95)
    expected = ["an update and a checkpoint take 150 s", "scoring and a checkpoint take 105 s"]
    assert [text.partition(",")[0] for text in caplog.messages] == expected


def test_an_evaluation_is_no_part_of_an_update(clock, caplog):
    """Nor of the rest of a step: a signal during the next rollout leaves that step its time."""
    stop, signals = make(clock)
    for place in ("rollout", "update"):
        stop.sync(place)
    clock.now += 20
    stop.step_done()
    clock.now += 600
    stop.sync("eval")
    clock.now += 5
    stop.sync_after_step()
    assert not caplog.text
    signals.note(WARNING)
    stop.check_rollout()
    clock.now += 100 - 10 - 20
    stop.check_rollout()
    stop.sync("update")
    stop.step_done()
    clock.now += 15  # 15 s are left for the rest of the evaluation, as measured, and a checkpoint
    stop.sync("eval")
    clock.now += 0.1
    with pytest.raises(GracefulExit, match="the unfinished evaluation"):
        stop.sync("eval")


def test_a_checkpoint_that_takes_longer_than_planned_is_named_and_gets_its_time(clock, caplog):
    stop, signals = make(clock)
    stop.note_save(9)
    assert not caplog.text
    for _ in range(2):
        stop.note_save(30)
    (text,) = caplog.messages
    assert "a checkpoint took 30 s, more than stop.save_s = 10" in text and "stop.term_s = 20" in text
    signals.note(WARNING)
    clock.now += 100 - 30
    stop.sync("rollout")
    clock.now += 15
    with pytest.raises(GracefulExit):
        stop.sync("update")


def test_a_second_signal_drops_at_once_and_sigterm_leaves_less_time(clock):
    stop, signals = make(clock)
    signals.note(WARNING)
    signals.note(WARNING)  # its echo
    stop.check_rollout()
    clock.now += ECHO_S
    signals.note(WARNING)
    with pytest.raises(RolloutInterrupted):
        stop.check_rollout()
    stop, signals = make(clock)
    signals.note(TERM)
    clock.now += 9
    stop.check_rollout()
    clock.now += 2
    with pytest.raises(RolloutInterrupted):
        stop.check_rollout()


def test_other_ranks_see_it_through_the_store_and_count_with_it(clock):
    store = Store()
    first, signals = make(clock, store)
    other, _ = make(clock, store)
    signals.note(WARNING)
    other.check_rollout()
    assert other.is_requested
    assert (other.reason(), first.reason()) == ("a signal on another rank", "SIGUSR1")
    clock.now += 89
    other.check_rollout()
    clock.now += 2
    with pytest.raises(RolloutInterrupted):
        other.check_rollout()


@pytest.mark.parametrize("second", [WARNING, TERM])
def test_other_ranks_see_a_second_signal_and_a_nearer_deadline_within_the_echo(clock, second):
    store = Store()
    stop, signals = make(clock, store)
    other, _ = make(clock, store)
    signals.note(WARNING)
    other.check_rollout()
    clock.now += 1 if second == TERM else ECHO_S
    signals.note(second)
    if second == TERM:
        other.check_rollout()
        clock.now += 11  # 9 s are left, and 10 are needed for the checkpoint
    with pytest.raises(RolloutInterrupted):
        other.check_rollout()
    stop.close()
    lines = store["shutdown"]
    signals.note(WARNING)
    assert store["shutdown"] == lines


def test_interruptible_returns_responses_or_that_there_are_none(clock):
    stop, signals = make(clock)

    def generate(call):
        call.check_interrupt()
        return ["a response"]

    def dies(call):
        raise BackendError("gone")

    call = GenerateCall((), SamplingParams())
    assert stop.interruptible(generate, call) == (["a response"], False)
    with pytest.raises(BackendError):
        stop.interruptible(dies, call)
    signals.note(TERM)
    assert stop.interruptible(dies, call) == ([], True)  # the same signal may have killed the engine
    clock.now += 15
    assert stop.interruptible(generate, call) == ([], True)
    with pytest.raises(GracefulExit):
        stop.sync("rollout", interrupted=True)
