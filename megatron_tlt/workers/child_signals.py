"""Keeping SIGUSR1 and SIGTERM from the processes that ranks start. Torch-free.

Slurm sends a step's signals to every process in it (measured: a reward worker dies of a SIGUSR1 that was meant for its
rank), so children are started with these signals blocked.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_NUMBERS = (signal.SIGUSR1, signal.SIGTERM)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Processes started inside do not get the two signals, from their first instruction on.

    They inherit the mask; `unblock_signals` in the child ends it. This process loses no signal: another thread, or
    this one afterwards, gets what comes meanwhile.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_signals() -> None:
    """In a child: both signals do nothing here from now on, and processes that it starts get them as usual."""
    for number in _NUMBERS:
        signal.signal(number, _do_nothing)  # not SIG_IGN, which a program started later would inherit
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _NUMBERS)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """A handler."""
