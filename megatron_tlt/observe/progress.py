"""Rank 0's display of a run in progress: lines, under them a live one on a terminal; or nothing.

No thread draws: the live line is redrawn, at most four times a second, when the loop or the engine reports, so that
drawing never competes with a kernel.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from megatron_tlt.errors import printable
from megatron_tlt.types import GenerateCall, Sample

Mode = Literal["auto", "rich", "plain", "none"]

# launch/local.sh sets this when mpiexec's output ends on a terminal: ranks themselves see a pipe.
TERMINAL_VARIABLE = "MEGATRON_TLT_TERMINAL_COLUMNS"

_REDRAW_S = 0.25
_LINE_S = 30.0  # least time between two lines of a rollout, where there is no live one

# (label, metric, format) of a step's line
_SHOWN = (
    ("seconds", "time/step", "{:.1f}"),
    ("tokens/s", "engine/tokens_per_s", "{:.0f}"),
    ("reward", "reward/mean", "{:.3f}"),
    ("accuracy", "reward/accuracy", "{:.3f}"),
    ("teacher KL", "policy/teacher_kl", "{:.4f}"),
    ("length", "length/mean", "{:.0f}"),
    ("truncated", "length/truncated", "{:.0%}"),
    ("accepted", "spec/accept_length", "{:.2f}"),
    ("turns", "env/turns", "{:.2f}"),
    ("waiting for tools", "env/parked_share", "{:.0%}"),
    ("aborted", "env/failures", "{:.0f}"),
    ("idle rank-s", "idle/seconds", "{:.1f}"),
    ("recovered rank-s", "idle/recovered_seconds", "{:.1f}"),
    ("pre-rolled rank-s", "pre_rollout/seconds", "{:.1f}"),
)
_LEAST = {"length/truncated": 0.05, "idle/seconds": 0.05}
"""From which value on a metric is shown, of those that are always there and seldom of interest."""


def step_line(step: int, num_steps: int | None, metrics: Mapping[str, float | None]) -> str:
    """A step (from 1) in a line, with the metrics of `_SHOWN` that it has."""
    of = "" if num_steps is None else f"/{num_steps}"
    low = {name for name, least in _LEAST.items() if (metrics.get(name) or 0.0) < least}
    values = [(head, form, metrics.get(name)) for head, name, form in _SHOWN if name not in low]
    shown = [f"{head} {form.format(value)}" for head, form, value in values if value is not None]
    return "  ".join([f"step {step}{of}", *shown])


@dataclass(slots=True)
class _WorkClock:
    """When a piece of work was started, in seconds, and how much of it was and is done."""

    started: float
    first: int
    done: int


class _Terminal(Console):
    """A console that never hides the cursor: a rank that is killed could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        """Does nothing."""
        return False


class ProgressDisplay:
    """A line a step, others by `note`; under them on a terminal a live line, elsewhere one every half minute."""

    def __init__(self, num_steps: int, console: Console | None):
        """`console` None: shows nothing."""
        self._num_steps, self._console = num_steps, console
        self._step, self._phase = 0, "start"
        self._phase_start = self._last_line = time.monotonic()
        self._drawn = 0.0
        self._work: dict[str, _WorkClock] = {}
        self._live: Live | None = None
        if console is not None and console.is_terminal:
            self._live = Live(console=console, auto_refresh=False, transient=True)
            self._live.start()

    def phase(self, name: str, step: int) -> None:
        """The run enters phase `name` of step number `step` (from 1)."""
        self._phase, self._step, self._phase_start = name, step, time.monotonic()
        self._redraw(self._now())

    def rollout(self, running: int, waiting: int, generated_tokens: int) -> None:
        """Counts of this rank's engine: requests, and tokens since the rollout began."""
        rate = generated_tokens / max(time.monotonic() - self._phase_start, 1e-9)
        counts = f"{running} running, {waiting} waiting, {generated_tokens} tokens, {rate:.0f} a second on this rank"
        self._show(f"{self._now()}: {counts}")

    def work(self, name: str, done: int, total: int) -> None:
        """`done` of `total` of the work `name`, its mean rate so far, and the time that the rest takes at this rate.

        The clock of a piece of work starts at its first call, before anything of this start is done, and again where
        `done` is less than it was. Two pieces of work may take turns.
        """
        now = time.monotonic()
        if (clock := self._work.get(name)) is None:
            self._last_line = now
        if clock is None or done < clock.done:
            self._work[name] = clock = _WorkClock(now, done, done)
        clock.done = done
        text = f"{name} {done}/{total}"
        if done > clock.first:
            each = (now - clock.started) / (done - clock.first) / 60  # minutes
            text += f", {1 / max(each, 1e-9):.3g} a minute, about {each * (total - done):.1f} minutes left"
        self._show(text)

    def watched(self, call: GenerateCall, name: str, total: int) -> GenerateCall:
        """`call` with callbacks that show as `name` how many of about `total` responses are finished."""
        finished = 0

        def respond(sample: Sample) -> None:
            nonlocal finished
            finished += 1
            if call.on_response is not None:
                call.on_response(sample)

        def report(running: int, waiting: int, generated_tokens: int) -> None:
            self.work(name, finished, max(total, finished + running + waiting))
            if call.on_progress is not None:
                call.on_progress(running, waiting, generated_tokens)

        self.work(name, 0, total)
        return replace(call, on_progress=report, on_response=respond)

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """Step number `step` (from 1) is done; its metrics over all ranks."""
        self.note(step_line(step, self._num_steps, metrics))

    def note(self, text: str) -> None:
        """A line of its own: a step, an evaluation, a checkpoint."""
        self._last_line = time.monotonic()
        if self._console is not None:
            self._console.print(printable(text.rstrip()), soft_wrap=True)

    def close(self) -> None:
        """Removes the live line."""
        if self._live is not None:
            self._live.stop()

    def _now(self) -> str:
        return f"step {self._step}/{self._num_steps} {self._phase}"

    def _show(self, text: str) -> None:
        """Shows `text` live, or where there is no live line as a line of its own every half minute."""
        if self._live is not None:
            self._redraw(text)
        elif time.monotonic() - self._last_line >= _LINE_S:
            self.note(text)

    def _redraw(self, text: str) -> None:
        """Redraws the live line, if there is one and it is not too new."""
        now = time.monotonic()
        if self._live is not None and now - self._drawn >= _REDRAW_S:
            self._drawn = now
            self._live.update(Text(text), refresh=True)


def build_progress(mode: Mode, num_steps: int, rank: int, stream: TextIO | None = None) -> ProgressDisplay:
    """The display for `observe.progress`; silent on ranks other than 0. `stream` defaults to stdout."""
    if rank != 0 or mode == "none":
        return ProgressDisplay(num_steps, None)
    stream = stream if stream is not None else sys.stdout
    columns = os.environ.get(TERMINAL_VARIABLE, "")
    width = int(columns) or None if columns.isdigit() else None  # None: as wide as the terminal
    is_live = mode == "rich" or (mode == "auto" and (columns.isdigit() or stream.isatty()))
    console = _Terminal(file=stream, force_terminal=is_live, width=width, highlight=False, markup=False, emoji=False)
    return ProgressDisplay(num_steps, console)
