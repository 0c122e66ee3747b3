"""Signals are noted by a thread and counted without their echoes."""

import os
import signal
import threading

import pytest

from megatron_tlt.config.run import ShutdownSection
from megatron_tlt.resilience.signals import ECHO_S, INTERRUPT, TERM, WARNING, StopSignals
from megatron_tlt.workers.child_signals import signals_blocked

SECTION = ShutdownSection(warning_s=100, term_s=20)


class Clock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.mark.parametrize("term", [TERM, INTERRUPT])
def test_each_signal_has_its_own_deadline_and_the_nearer_one_counts(clock, term):
    signals = StopSignals(clock, exit_now=lambda code: None)
    signals.note(int(signal.SIGCONT))  # another handler's
    assert (signals.count, signals.deadline(SECTION)) == (0, None)
    signals.note(WARNING)
    assert signals.deadline(SECTION) == 1100
    clock.now += 30
    signals.note(term)
    assert signals.deadline(SECTION) == 1050
    clock.now += 30
    signals.note(WARNING)  # later ones postpone nothing
    assert signals.deadline(SECTION) == 1050


def test_echoes_count_once_and_the_third_signal_ends_the_process(clock):
    ended = []
    signals = StopSignals(clock, ended.append)
    for number in (TERM, TERM, WARNING):  # as Slurm sends them on preemption
        signals.note(number)
        clock.now += ECHO_S / 2
    assert signals.count == 1
    clock.now += ECHO_S
    signals.note(TERM)
    assert (signals.count, ended) == (2, [])
    clock.now += ECHO_S
    signals.note(TERM)
    assert ended == [128 + TERM]


def test_ctrl_c_twice_ends_the_process(clock):
    ended = []
    signals = StopSignals(clock, ended.append)
    for seconds, expected in ((0.0, []), (0.1, []), (1.0, [128 + INTERRUPT])):
        clock.now += seconds
        signals.note(INTERRUPT)
        assert ended == expected


def test_a_signal_is_noted_while_the_main_thread_is_in_c_even_if_it_starts_children():
    before = {number: signal.getsignal(number) for number in (WARNING, TERM, INTERRUPT)}
    signals, noted = StopSignals().install(), threading.Event()
    signals.on_signal(noted.set)
    try:
        with signals_blocked():
            os.kill(os.getpid(), signal.SIGINT)
        assert noted.wait(20)  # holds the main thread in a lock: only the other thread can set the event
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGUSR1, signal.SIGTERM, signal.SIGINT} == set()
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
    assert signals.count == 1
