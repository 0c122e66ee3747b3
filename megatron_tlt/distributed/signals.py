"""SIGUSR1 and SIGTERM: noting them in ranks, and keeping them from the processes that ranks start. Torch-free.

Slurm sends a step's signals to every process in it (measured: a reward worker dies of a SIGUSR1 that was meant for its
rank), so children are started `shielded`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_tlt.config.shutdown import ShutdownSection

WARNING, TERM = int(signal.SIGUSR1), int(signal.SIGTERM)
ECHO_S = 5.0  # signals closer together than this count once


class StopSignals:
    """Notes SIGUSR1 and SIGTERM. A thread of its own hears them, so also a rank that is stuck in a collective does.

    `count` says how many were meant (echoes left out), `first` is the (number, seconds) of the earliest.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, exit_now: Callable[[int], None] = os._exit
    ):
        self.count = 0
        self.term_at: float | None = None
        self.warned_at: float | None = None
        self.listener: Callable[[], None] | None = None  # called by the thread after each signal that counts
        self._clock, self._exit_now = clock, exit_now
        self._last = 0.0
        self._pipe: tuple[int, int] | None = None
        self._previous: dict[
            int, signal.Handlers | Callable[[int, FrameType | None], object] | int | None
        ] = {}

    def install(self) -> StopSignals:
        """Takes the signals over; the main thread only. `restore` gives them back."""
        read, write = os.pipe()
        os.set_blocking(write, False)
        self._pipe = read, write
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (WARNING, TERM):
            self._previous[number] = signal.signal(number, _heard_elsewhere)
        threading.Thread(target=self._listen, args=(read,), name="signals", daemon=True).start()
        return self

    def restore(self) -> None:
        """The handlers that were there before. Idempotent."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)
            os.close(self._pipe[1])  # ends the thread
            self._pipe = None

    def note(self, number: int) -> None:
        """A signal has come."""
        if number not in (WARNING, TERM):
            return  # another handler's
        now = self._clock()
        if number == TERM:
            self.term_at = now if self.term_at is None else self.term_at
        else:
            self.warned_at = now if self.warned_at is None else self.warned_at
        if not self.count or now - self._last >= ECHO_S:
            self.count += 1
        self._last = now
        if self.count > 2:
            self._exit_now(128 + number)
        if self.listener is not None:
            self.listener()

    def deadline(self, section: ShutdownSection) -> float | None:
        """When every rank must be gone, by this rank's clock; None before any signal."""
        times = []
        if self.warned_at is not None:
            times.append(self.warned_at + section.warning_s)
        if self.term_at is not None:
            times.append(self.term_at + section.term_s)
        return min(times) if times else None

    def _listen(self, read: int) -> None:
        while data := os.read(read, 64):
            for number in data:
                self.note(number)
        os.close(read)


def _heard_elsewhere(number: int, frame: FrameType | None) -> None:
    """Python's own handler does nothing: it would run only when the main thread is back from C."""


@contextmanager
def shielded(*numbers: int) -> Iterator[None]:
    """Processes started inside do not get these signals (default: both), from their first instant on.

    They inherit a mask; `unshield` in the child ends it once the child can stand them. This process loses nothing:
    another thread, or this one afterwards, takes what comes meanwhile.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers or (WARNING, TERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unshield() -> None:
    """In a child: both signals do nothing here from now on, and what the child starts gets them as usual."""
    for number in (WARNING, TERM):
        signal.signal(number, _heard_elsewhere)  # not SIG_IGN, which a program started later would inherit
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (WARNING, TERM))
