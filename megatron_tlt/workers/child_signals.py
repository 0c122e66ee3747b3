"""Keeping SIGUSR1, SIGTERM and Ctrl-C from the processes that ranks start. Torch-free.

Slurm sends a step's signals to every process in it (measured: a reward worker dies of a SIGUSR1 that was meant for its
rank), a terminal Ctrl-C to a process group, so children are started with these signals blocked.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

_NUMBERS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Processes started inside do not get the signals, from their first instruction on.

    They inherit the mask; `unblock_signals` in the child ends it. This process loses no signal: another thread, or
    this one afterwards, gets what comes meanwhile.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_signals() -> None:
    """In a child: the signals do nothing here from now on, and processes that it starts get them as usual."""
    for number in _NUMBERS:
        signal.signal(number, _do_nothing)  # not SIG_IGN, which a program started later would inherit
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _NUMBERS)


def sigterm_ends_forks() -> None:
    """In a child: SIGTERM ends the processes that it forks from now on, as `terminate` of multiprocessing expects.

    SIGUSR1 still does nothing in them: no user's code sends it, and Slurm's would break a pool that lives on.
    """
    block, unblock = (
        partial(signal.pthread_sigmask, how, {signal.SIGTERM}) for how in (signal.SIG_BLOCK, signal.SIG_UNBLOCK)
    )
    # Blocked meanwhile: a signal that a fork gets at once waits until the fork has its own handler.
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=_end_by_sigterm)


def _end_by_sigterm() -> None:
    if signal.getsignal(signal.SIGTERM) is _do_nothing:  # else it is the user's own
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """A handler."""
