"""What a person sees while a run goes on: a live table on a terminal, plain lines elsewhere, or nothing.

Only rank 0 shows anything. No thread draws: the table is redrawn, at most four times a second, when the loop
or the engine reports, so that drawing never competes with a kernel in the middle of its work.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Literal, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

Mode = Literal["auto", "rich", "plain", "none"]

# launch/local.sh sets this when mpiexec's output ends on a terminal: ranks themselves see a pipe.
TERMINAL_VARIABLE = "MEGATRON_TLT_TERMINAL_COLUMNS"

_REDRAW_S = 0.25
_PLAIN_HEARTBEAT_S = 30.0
_ROWS = 12

# (heading, metric, format) of the columns, where the metric is there
COLUMNS = (
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


class Progress:
    """The silent one, and what all of them understand."""

    def phase(self, name: str, step: int) -> None:
        """The run entered phase `name` of step `step` (steps done so far)."""

    def rollout(self, running: int, waiting: int, generated_tokens: int) -> None:
        """Live figures of this rank's engine: requests, and tokens since the rollout began."""

    def step_done(self, step: int, seconds: float, tokens: int, metrics: Mapping[str, float]) -> None:
        """Step number `step` (from 1) took `seconds` and generated `tokens` over all ranks."""

    def note(self, text: str) -> None:
        """Something worth a line: an evaluation, a checkpoint."""

    def close(self) -> None:
        """Leaves the terminal as it was."""


class PlainProgress(Progress):
    """One line a step; during a long phase one every half minute."""

    def __init__(self, num_steps: int, stream: TextIO):
        self.num_steps, self.stream = num_steps, stream
        self._step = 0
        self._spoke = time.monotonic()

    def phase(self, name: str, step: int) -> None:
        """Remembers the step."""
        self._step = step

    def rollout(self, running: int, waiting: int, generated_tokens: int) -> None:
        """A line if the last one is long ago."""
        if time.monotonic() - self._spoke >= _PLAIN_HEARTBEAT_S:
            self.note(
                f"step {self._step + 1}/{self.num_steps} rollout: {running} running, {waiting} waiting, "
                f"{generated_tokens} tokens"
            )

    def step_done(self, step: int, seconds: float, tokens: int, metrics: Mapping[str, float]) -> None:
        """The step's line."""
        figures = "  ".join(f"{name} {text}" for name, text in step_figures(metrics))
        speed = tokens / max(seconds, 1e-9)
        self.note(f"step {step}/{self.num_steps}  {seconds:.1f} s  {speed:.0f} tokens/s  {figures}")

    def note(self, text: str) -> None:
        """Prints and flushes one line."""
        self._spoke = time.monotonic()
        print(text.rstrip(), file=self.stream, flush=True)


class RichProgress(Progress):
    """A table of the last steps with a live line under it."""

    def __init__(self, num_steps: int, console: Console):
        self.num_steps = num_steps
        self._console = console
        self._rows: deque[tuple[int, float, float, Mapping[str, float]]] = deque(maxlen=_ROWS)
        self._step, self._phase = 0, "start"
        self._live_text = ""
        self._phase_start = time.monotonic()
        self._drawn = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._live.start()

    def phase(self, name: str, step: int) -> None:
        """Shows the phase."""
        self._step, self._phase, self._live_text = step, name, ""
        self._phase_start = time.monotonic()
        self._draw()

    def rollout(self, running: int, waiting: int, generated_tokens: int) -> None:
        """Shows requests and speed."""
        seconds = max(time.monotonic() - self._phase_start, 1e-9)
        queue = f" + {waiting} waiting" if waiting else ""
        self._live_text = f"{running} requests{queue}, {generated_tokens / seconds:.0f} tokens/s on this rank"
        self._draw()

    def step_done(self, step: int, seconds: float, tokens: int, metrics: Mapping[str, float]) -> None:
        """Adds a row."""
        self._step = step
        self._rows.append((step, seconds, tokens / max(seconds, 1e-9), metrics))
        self._draw(force=True)

    def note(self, text: str) -> None:
        """Prints above the table."""
        self._console.print(text, highlight=False)

    def close(self) -> None:
        """Stops the live display; the table stays."""
        self._phase, self._live_text = "done", ""
        self._draw(force=True)
        self._live.stop()

    def _draw(self, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self._drawn >= _REDRAW_S:
            self._drawn = now
            self._live.update(self._render(), refresh=True)

    def _render(self) -> RenderableType:
        shown = [(head, key, form) for head, key, form in COLUMNS if any(key in row[3] for row in self._rows)]
        table = Table("step", "seconds", "tokens/s", *[head for head, _, _ in shown], expand=False)
        for column in table.columns:
            column.justify = "right"
        for step, seconds, speed, metrics in self._rows:
            cells = [form.format(metrics[key]) if key in metrics else "" for _, key, form in shown]
            table.add_row(str(step), f"{seconds:.1f}", f"{speed:.0f}", *cells)
        now = Text(
            f"step {min(self._step + 1, self.num_steps)}/{self.num_steps}  {self._phase}  {self._live_text}"
        )
        return Group(table, now) if self._rows else now


def step_figures(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Heading and text of the figures that a step has."""
    return [(head, form.format(metrics[key])) for head, key, form in COLUMNS if key in metrics]


def terminal_columns(stream: TextIO) -> int | None:
    """Width of the terminal behind `stream`, 0 if it has one of unknown width, None if it has none."""
    told = os.environ.get(TERMINAL_VARIABLE, "")
    if told.isdigit():
        return int(told)
    return 0 if stream.isatty() else None


def build_progress(mode: Mode, num_steps: int, rank: int, stream: TextIO | None = None) -> Progress:
    """The display for `observe.progress`; silent on ranks other than 0. `stream` defaults to stdout."""
    stream = stream if stream is not None else sys.stdout
    columns = terminal_columns(stream)
    if rank != 0 or mode == "none":
        return Progress()
    if mode == "plain" or (mode == "auto" and columns is None):
        return PlainProgress(num_steps, stream)
    return RichProgress(num_steps, Console(file=stream, force_terminal=True, width=columns or None))
