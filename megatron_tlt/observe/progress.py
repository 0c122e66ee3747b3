"""What rank 0 shows of a run in progress: a live table on a terminal, plain lines elsewhere, or nothing.

No thread draws: the table is redrawn, at most four times a second, when the loop or the engine reports, so that drawing
never competes with a kernel.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

Mode = Literal["auto", "rich", "plain", "none"]

# launch/local.sh sets this when mpiexec's output ends on a terminal: ranks themselves see a pipe.
TERMINAL_VARIABLE = "MEGATRON_TLT_TERMINAL_COLUMNS"

_REDRAW_S = 0.25
_PLAIN_LINE_S = 30.0  # least time between two lines of a rollout
_ROWS = 12

# (heading, metric, format) of the columns, where the metric is there
_COLUMNS = (
    ("seconds", "time/step", "{:.1f}"),
    ("tokens/s", "engine/tokens_per_s", "{:.0f}"),
    ("reward", "reward/mean", "{:.3f}"),
    ("accuracy", "reward/accuracy", "{:.3f}"),
    ("length", "length/mean", "{:.0f}"),
    ("accepted", "spec/accept_length", "{:.2f}"),
    ("idle rank-s", "idle/seconds", "{:.1f}"),
    ("recovered rank-s", "idle/recovered_seconds", "{:.1f}"),
)


def steps_table(rows: Mapping[int, Mapping[str, float | None]], **style: Any) -> Table:
    """A table of the metrics of steps, by step, with a column for each of `_COLUMNS` that a step has."""
    shown = [column for column in _COLUMNS if any(row.get(column[1]) is not None for row in rows.values())]
    table = Table("step", *(head for head, _, _ in shown), **style)
    for column in table.columns:
        column.justify = "right"
    for step, row in rows.items():
        values = [(form, row.get(metric)) for _, metric, form in shown]
        table.add_row(str(step), *("" if value is None else form.format(value) for form, value in values))
    return table


class Progress:
    """Shows nothing; the interface of the others."""

    def phase(self, name: str, step: int) -> None:
        """The run enters phase `name`, with `step` steps done."""

    def rollout(self, running: int, waiting: int, generated_tokens: int) -> None:
        """Counts of this rank's engine: requests, and tokens since the rollout began."""

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """Step number `step` (from 1) is done; its metrics over all ranks."""

    def note(self, text: str) -> None:
        """A line of its own: an evaluation, a checkpoint."""

    def close(self) -> None:
        """Leaves the terminal as it was."""


class PlainProgress(Progress):
    """One line a step; during a long rollout one every half minute."""

    def __init__(self, num_steps: int, stream: TextIO):
        self.num_steps, self.stream = num_steps, stream
        self._step = 0
        self._last_line = time.monotonic()

    def phase(self, name: str, step: int) -> None:
        self._step = step

    def rollout(self, running: int, waiting: int, generated_tokens: int) -> None:
        if time.monotonic() - self._last_line >= _PLAIN_LINE_S:
            counts = f"{running} running, {waiting} waiting, {generated_tokens} tokens"
            self.note(f"step {self._step + 1}/{self.num_steps} rollout: {counts}")

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [f"{head} {form.format(metrics[name])}" for head, name, form in _COLUMNS if name in metrics]
        self.note("  ".join([f"step {step}/{self.num_steps}", *values]))

    def note(self, text: str) -> None:
        self._last_line = time.monotonic()
        print(text.rstrip(), file=self.stream, flush=True)


class RichProgress(Progress):
    """A table of the last steps with a live line under it."""

    def __init__(self, num_steps: int, console: Console):
        self.num_steps = num_steps
        self._console = console
        self._rows: dict[int, Mapping[str, float]] = {}
        self._step, self._phase, self._counts = 0, "start", ""
        self._phase_start = time.monotonic()
        self._drawn = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._live.start()

    def phase(self, name: str, step: int) -> None:
        self._step, self._phase, self._counts = step, name, ""
        self._phase_start = time.monotonic()
        self._draw()

    def rollout(self, running: int, waiting: int, generated_tokens: int) -> None:
        seconds = max(time.monotonic() - self._phase_start, 1e-9)
        queue = f" + {waiting} waiting" if waiting else ""
        self._counts = f"{running} requests{queue}, {generated_tokens / seconds:.0f} tokens/s on this rank"
        self._draw()

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        self._rows = dict([*self._rows.items(), (step, metrics)][-_ROWS:])
        self._draw(force=True)

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def close(self) -> None:
        self._phase, self._counts = "done", ""
        self._draw(force=True)
        self._live.stop()

    def _draw(self, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self._drawn >= _REDRAW_S:
            self._drawn = now
            step = min(self._step + 1, self.num_steps)
            text = Text(f"step {step}/{self.num_steps}  {self._phase}  {self._counts}")
            table = [steps_table(self._rows)] if self._rows else []
            self._live.update(Group(*table, text), refresh=True)


def build_progress(mode: Mode, num_steps: int, rank: int, stream: TextIO | None = None) -> Progress:
    """The display for `observe.progress`; silent on ranks other than 0. `stream` defaults to stdout."""
    stream = stream if stream is not None else sys.stdout
    columns = os.environ.get(TERMINAL_VARIABLE, "")
    is_terminal = columns.isdigit() or stream.isatty()
    if rank != 0 or mode == "none":
        return Progress()
    if mode == "plain" or (mode == "auto" and not is_terminal):
        return PlainProgress(num_steps, stream)
    width = int(columns) or None if columns.isdigit() else None  # None: as wide as the terminal
    return RichProgress(num_steps, Console(file=stream, force_terminal=True, width=width))
