"""What rank 0 shows of a run in progress: a live table on a terminal, plain lines elsewhere, or nothing.

No thread draws: the table is redrawn, at most four times a second, when the loop or the engine reports, so that drawing
never competes with a kernel.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TextIO

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
    ("reward", "reward/mean", "{:.3f}"),
    ("accuracy", "reward/accuracy", "{:.3f}"),
    ("length", "length/mean", "{:.0f}"),
    ("entropy", "policy/entropy", "{:.3f}"),
    ("grad norm", "policy/grad_norm", "{:.3f}"),
    ("accepted", "spec/accept_length", "{:.2f}"),
    ("idle rank-s", "idle/seconds", "{:.1f}"),
    ("recovered rank-s", "idle/recovered_seconds", "{:.1f}"),
    ("drafter steps", "drafter/steps", "{:.0f}"),
)


class StepRow(NamedTuple):
    """A step as the tables show it; what is None is left empty."""

    step: int
    seconds: float | None
    tokens_per_s: float | None
    metrics: Mapping[str, float | None]


def steps_table(rows: Sequence[StepRow], without: Collection[str] = (), **style: Any) -> Table:
    """A table of steps with a column for each metric that a step has, but those in `without`."""
    shown = [
        column
        for column in _COLUMNS
        if column[1] not in without and any(row.metrics.get(column[1]) is not None for row in rows)
    ]
    table = Table("step", "seconds", "tokens/s", *(head for head, _, _ in shown), **style)
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        values = [("{:.1f}", row.seconds), ("{:.0f}", row.tokens_per_s)]
        values += [(form, row.metrics.get(metric)) for _, metric, form in shown]
        table.add_row(str(row.step), *("" if value is None else form.format(value) for form, value in values))
    return table


class Progress:
    """Shows nothing; the interface of the others."""

    def phase(self, name: str, step: int) -> None:
        """The run enters phase `name`, with `step` steps done."""

    def rollout(self, running: int, waiting: int, generated_tokens: int) -> None:
        """Counts of this rank's engine: requests, and tokens since the rollout began."""

    def step_done(self, step: int, seconds: float, tokens: int, metrics: Mapping[str, float]) -> None:
        """Step number `step` (from 1) took `seconds` and generated `tokens` over all ranks."""

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

    def step_done(self, step: int, seconds: float, tokens: int, metrics: Mapping[str, float]) -> None:
        figures = [f"{head} {form.format(metrics[name])}" for head, name, form in _COLUMNS if name in metrics]
        speed = f"{tokens / max(seconds, 1e-9):.0f} tokens/s"
        self.note("  ".join([f"step {step}/{self.num_steps}", f"{seconds:.1f} s", speed, *figures]))

    def note(self, text: str) -> None:
        self._last_line = time.monotonic()
        print(text.rstrip(), file=self.stream, flush=True)


class RichProgress(Progress):
    """A table of the last steps with a live line under it."""

    def __init__(self, num_steps: int, console: Console):
        self.num_steps = num_steps
        self._console = console
        self._rows: deque[StepRow] = deque(maxlen=_ROWS)
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

    def step_done(self, step: int, seconds: float, tokens: int, metrics: Mapping[str, float]) -> None:
        self._rows.append(StepRow(step, seconds, tokens / max(seconds, 1e-9), metrics))
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
