"""Noting SIGUSR1, SIGTERM and Ctrl-C in a rank. Torch-free."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from megatron_tlt.config.run import ShutdownSection

WARNING, TERM, INTERRUPT = int(signal.SIGUSR1), int(signal.SIGTERM), int(signal.SIGINT)
ECHO_S = 5.0  # closer signals count once: on preemption Slurm sends SIGTERM twice and SIGUSR1 (measured)
AGAIN_S = 0.5  # between two Ctrl-C of a person; a launcher repeats one at once


class StopSignals:
    """Notes SIGUSR1, SIGTERM and SIGINT (Ctrl-C) in its own thread, also while the main thread is in a collective.

    `count` is how many came (echoes left out); `first_at` has the seconds of the first of each kind, by number.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, exit_now: Callable[[int], None] = os._exit):
        self.count = 0
        self.first_at: dict[int, float] = {}
        self._on_signal: Callable[[], None] | None = None
        self._clock, self._exit_now = clock, exit_now
        self._last = 0.0

    def install(self) -> StopSignals:
        """Replaces the handlers; the main thread only."""
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (WARNING, TERM, INTERRUPT):
            signal.signal(number, _noted_by_thread)
        threading.Thread(target=self._note_all, args=(read,), name="signals", daemon=True).start()
        return self

    def on_signal(self, callback: Callable[[], None] | None) -> None:
        """From now on the thread calls `callback` after each signal; at once if there was one already."""
        self._on_signal = callback
        if self.count and callback is not None:
            callback()

    def note(self, number: int) -> None:
        """Records a signal. The third one ends the process, of Ctrl-C the second."""
        if number not in (WARNING, TERM, INTERRUPT):
            return  # another handler's
        now = self._clock()
        insists = number == INTERRUPT and now - self.first_at.get(INTERRUPT, now) >= AGAIN_S
        self.first_at = {number: now} | self.first_at  # a new one: another thread may be reading it
        if not self.count or now - self._last >= ECHO_S:
            self.count += 1
        self._last = now
        if self.count > 2 or insists:
            self._exit_now(128 + number)
        if self._on_signal is not None:
            self._on_signal()

    def deadline(self, section: ShutdownSection) -> float | None:
        """When every rank must have exited, by this rank's clock; None before any signal."""
        seconds = {WARNING: section.warning_s, TERM: section.term_s, INTERRUPT: section.term_s}
        return min((at + seconds[number] for number, at in self.first_at.items()), default=None)

    def _note_all(self, read: int) -> NoReturn:
        while True:
            for number in os.read(read, 64):
                self.note(number)


def _noted_by_thread(number: int, frame: FrameType | None) -> None:
    """Python's own handler does nothing: it would run only when the main thread is back from C."""
