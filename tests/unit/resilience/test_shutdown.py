"""When one rank drops its rollout, and what all make of it; several ranks are in tests/integration/test_stop.py."""

from types import SimpleNamespace

import pytest

from megatron_tlt.config.shutdown import ShutdownSection
from megatron_tlt.distributed.signals import ECHO_S, TERM, WARNING, StopSignals
from megatron_tlt.errors import BackendError
from megatron_tlt.resilience.shutdown import GracefulExit, GracefulShutdown, RolloutInterrupted


class Clock:
    now = 50.0

    def __call__(self):
        return self.now


class Store(dict):
    """The calls of a torch store that are used, in a dictionary."""

    def set(self, key, value):
        self[key] = value.encode()

    def get(self, key):
        return self[key]

    def check(self, keys):
        return all(key in self for key in keys)


@pytest.fixture
def clock():
    return Clock()


def keeper(clock, store=None, **options):
    """A keeper with its signals. Where it has a store it is one of two ranks, else alone."""
    signals = StopSignals(clock, exit_now=lambda code: None)
    world = SimpleNamespace(size=1 if store is None else 2, store=store)
    section = ShutdownSection(warning_s=100, term_s=20, save_s=10)
    return GracefulShutdown(world, section, signals, clock=clock, **options), signals


def finish_step(stop, clock, rest, update):
    """A step that takes `rest` seconds from the rollout's end, of which `update` are the update."""
    stop.agree("rollout")
    clock.now += rest - update
    stop.agree("update")
    clock.now += update
    stop.agree_at_end()


def test_without_a_signal_everybody_goes_on(clock):
    stop, _ = keeper(clock)
    stop.check_rollout()
    finish_step(stop, clock, 3, 1)
    assert not stop.is_requested
    assert not stop.dropped


def test_a_rollout_goes_on_as_long_as_the_rest_of_the_step_fits(clock):
    stop, signals = keeper(clock)
    finish_step(stop, clock, rest=30, update=20)
    signals.note(WARNING)
    clock.now += 100 - 10 - 30  # all but the checkpoint and the rest of the step, as measured
    stop.check_rollout()
    clock.now += 0.1
    with pytest.raises(RolloutInterrupted):
        stop.check_rollout()


def test_a_rollout_that_ends_in_time_is_finished_and_left_after_the_step(clock):
    stop, signals = keeper(clock)
    finish_step(stop, clock, rest=30, update=20)
    signals.note(WARNING)
    clock.now += 55
    stop.agree("rollout")
    clock.now += 10
    stop.agree("update")
    clock.now += 20
    with pytest.raises(GracefulExit, match="done"):
        stop.agree_at_end()
    assert not stop.dropped


def test_an_update_that_would_not_fit_any_more_is_not_begun(clock):
    stop, signals = keeper(clock)
    finish_step(stop, clock, rest=30, update=20)
    signals.note(WARNING)
    clock.now += 55
    stop.agree("rollout")
    clock.now += (
        16  # scoring took longer than before: 29 seconds are left, 20 and the checkpoint's 10 are needed
    )
    with pytest.raises(GracefulExit, match="dropped"):
        stop.agree("update")
    assert stop.dropped


def test_a_second_signal_drops_at_once(clock):
    stop, signals = keeper(clock)
    signals.note(WARNING)
    stop.check_rollout()
    signals.note(WARNING)  # its echo
    stop.check_rollout()
    clock.now += ECHO_S
    signals.note(WARNING)
    with pytest.raises(RolloutInterrupted):
        stop.check_rollout()


def test_sigterm_leaves_less_time(clock):
    stop, signals = keeper(clock)
    signals.note(TERM)
    clock.now += 9
    stop.check_rollout()
    clock.now += 2
    with pytest.raises(RolloutInterrupted):
        stop.check_rollout()


def test_a_signal_that_came_before_anything_was_built_counts(clock):
    signals = StopSignals(clock)
    signals.note(WARNING)
    stop = GracefulShutdown(SimpleNamespace(size=1), ShutdownSection(), signals, clock=clock)
    with pytest.raises(GracefulExit):
        stop.agree_at_end()


def test_other_ranks_hear_it_through_the_store_and_count_with_them(clock):
    store = Store()
    told, signals = keeper(clock, store)
    hearing, _ = keeper(clock, store)
    signals.note(WARNING)
    hearing.check_rollout()
    assert hearing.is_requested
    assert hearing.why() == "a signal on another rank"
    assert told.why() == "SIGUSR1"
    clock.now += 89
    hearing.check_rollout()
    clock.now += 2
    with pytest.raises(RolloutInterrupted):
        hearing.check_rollout()


def test_other_ranks_hear_a_second_signal_too(clock):
    store = Store()
    _, signals = keeper(clock, store)
    hearing, _ = keeper(clock, store)
    signals.note(WARNING)
    hearing.check_rollout()
    clock.now += ECHO_S
    signals.note(WARNING)
    with pytest.raises(RolloutInterrupted):
        hearing.check_rollout()


def test_other_ranks_hear_a_sooner_end_within_the_echo(clock):
    """SIGTERM right after the warning counts with it, but the time that it leaves is shorter: for all."""
    store = Store()
    _, signals = keeper(clock, store)
    hearing, _ = keeper(clock, store)
    signals.note(WARNING)
    hearing.check_rollout()
    clock.now += 1
    signals.note(TERM)
    hearing.check_rollout()
    clock.now += 9
    hearing.check_rollout()
    clock.now += 2  # 9 s are left, and 10 are needed for the checkpoint
    with pytest.raises(RolloutInterrupted):
        hearing.check_rollout()


def test_a_closed_keeper_tells_nobody(clock):
    store = Store()
    stop, signals = keeper(clock, store)
    stop.close()
    signals.note(WARNING)
    assert store == {}


def test_ranks_of_one_engine_drop_together_or_not_at_all(clock):
    others = [0]
    stop, _ = keeper(clock, agree_in_engine=lambda mine: max(mine, *others))
    stop.check_rollout()
    others[0] = 1
    with pytest.raises(RolloutInterrupted):
        stop.check_rollout()


def test_guarded_passes_answers_and_progress_on(clock):
    stop, _ = keeper(clock)
    seen = []

    def generate(tell):
        tell(3, 2, 1)
        return ["answer"]

    assert stop.guarded(generate, lambda *now: seen.append(now)) == (["answer"], False)
    assert seen == [(3, 2, 1)]


def test_guarded_says_that_a_rollout_was_cut_short(clock):
    stop, signals = keeper(clock)
    signals.note(TERM)
    clock.now += 15
    assert stop.guarded(lambda tell: tell(1, 0, 0)) == ([], True)
    with pytest.raises(GracefulExit):
        stop.agree("rollout", dropped=True)


def test_an_engine_that_the_same_signal_killed_is_a_dropped_rollout_and_any_other_an_error(clock):
    stop, signals = keeper(clock)

    def generate(tell):
        raise BackendError("gone")

    with pytest.raises(BackendError):
        stop.guarded(generate)
    signals.note(TERM)
    assert stop.guarded(generate) == ([], True)
