"""Signals noted by a thread, counted without their echoes, and kept from children."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from megatron_tlt.config.shutdown import ShutdownSection
from megatron_tlt.distributed.signals import ECHO_S, TERM, WARNING, StopSignals, shielded

SECTION = ShutdownSection(warning_s=100, term_s=20)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def wait_until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_before_any_signal_there_is_no_deadline(clock):
    assert StopSignals(clock).deadline(SECTION) is None


def test_each_signal_has_its_own_grace_and_the_nearer_end_counts(clock):
    signals = StopSignals(clock, exit_now=lambda code: None)
    signals.note(WARNING)
    assert signals.deadline(SECTION) == 1100
    clock.now += 30
    signals.note(TERM)
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


def test_other_signals_are_nobodys_business(clock):
    signals = StopSignals(clock)
    signals.note(int(signal.SIGCONT))
    assert (signals.count, signals.deadline(SECTION)) == (0, None)


def test_a_signal_is_heard_while_the_main_thread_is_in_c_and_handlers_come_back():
    before = signal.getsignal(signal.SIGUSR1)
    signals = StopSignals().install()
    heard = threading.Event()
    signals.listener = heard.set
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        # `wait` holds the main thread in a lock: only the other thread can set the event.
        assert heard.wait(20)
    finally:
        signals.restore()
    assert signals.count == 1
    assert signal.getsignal(signal.SIGUSR1) == before
    signals.restore()  # idempotent


CHILD = """
import os, sys, time
if sys.argv[1] == "unshield":
    from megatron_tlt.distributed.signals import unshield
    unshield()
print("ready", flush=True)
time.sleep(float(sys.argv[2]))
print("alive", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.parametrize("how", ["masked", "unshield"])
def test_a_shielded_child_outlives_signals(how, number):
    with shielded():
        child = subprocess.Popen([sys.executable, "-c", CHILD, how, "0.5"], stdout=subprocess.PIPE, text=True)
    child.send_signal(number)  # before its first instruction
    assert child.stdout.readline() == "ready\n"
    child.send_signal(number)
    assert child.communicate(timeout=60)[0] == "alive\n"
    assert child.returncode == 0


def test_the_parent_gets_what_came_while_it_shielded():
    signals = StopSignals().install()
    try:
        with shielded():
            os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: signals.count == 1)
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGUSR1, signal.SIGTERM} == set()
    finally:
        signals.restore()


def test_what_an_unshielded_child_starts_gets_signals_as_usual():
    script = (
        "import subprocess, sys; from megatron_tlt.distributed.signals import unshield; unshield();"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        "p.terminate(); sys.exit(-p.wait())"
    )
    with shielded():
        child = subprocess.Popen([sys.executable, "-c", script])
    assert child.wait(timeout=60) == signal.SIGTERM
