"""`megatron-tlt watch`: a run in progress on the terminal. Reads the files that the run writes; torch-free.

Every view reads what has changed of metrics.jsonl, and the end of each rank's event log. How up to date the logs are
depends on the run: with `observe.live` off, ranks write them at the end of a step only.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megatron_tlt.observe.events import events_path
from megatron_tlt.observe.jsonl import Row, parse_row
from megatron_tlt.observe.metrics import METRICS_FILE
from megatron_tlt.observe.progress import steps_table
from megatron_tlt.observe.runfiles import CONFIG_FILE, RunData, is_event, ranks_of, read_run
from megatron_tlt.observe.summary import SUMMARY_FILE

_LOG_END = 1 << 14  # bytes read of each event log: several steps
_RANKS = 16  # rows of the table of ranks
_ROWS = 8  # rows of the table of steps
_STYLES = {"rollout": "blue", "idle": "yellow", "update": "green", "eval": "magenta", "ended": "dim"}
_BOX: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0)}


@dataclass
class RankView:
    """The present state of a rank, by its events."""

    rank: int
    step: int | None = None
    phase: str = "start"
    since: float = 0.0
    """Seconds since the epoch at which the phase began."""
    running: int | None = None
    waiting: int | None = None
    tokens: int | None = None
    """Of this rollout."""
    idle: float = 0.0
    """Seconds in the state, in the last idle phase that has ended."""
    training: float = 0.0
    """As `idle`."""
    seen: float = 0.0
    """Seconds since the epoch of its last event."""
    error: str | None = None
    _states: Counter[str] = field(default_factory=Counter)

    def add(self, row: Row) -> None:
        """Updates the state by the next event."""
        name, kind, attrs = row["name"], row.get("kind"), row.get("attrs", {})
        self.seen = max(self.seen, row["ts"] + row.get("dur", 0.0))
        if name == "open":
            self.phase, self.since, self.error = "start", row["ts"], None
        elif name == "enter":
            self._begin(str(attrs.get("phase", "?")), row)
        elif name == "running":
            self.running, self.waiting, self.tokens = (attrs.get(n) for n in ("running", "waiting", "tokens"))
        elif kind == "state":
            self._states[name] += row["dur"]
        elif kind == "span":
            if "error" in attrs:
                self.error = f"{name}: {attrs['error']}"
            if name == "idle":
                self.idle, self.training = self._states["IDLE"], self._states["TRAINING"]
                self._states.clear()
            if name == self.phase or row["ts"] >= self.since:
                self._begin(f"after {name}", row)

    def _begin(self, phase: str, row: Row) -> None:
        self.phase, self.step, self.since = phase, row.get("step"), row["ts"]
        self.running = self.waiting = self.tokens = None


def read_rank(run_dir: Path, rank: int) -> RankView:
    """A rank's state by the end of its event log."""
    view = RankView(rank)
    with events_path(run_dir, rank).open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _LOG_END))
        for line in file:  # the first one may be cut, and the last one may be in the middle of being written
            row = parse_row(line)
            if row is not None and is_event(row):
                view.add(row)
    return view


@lru_cache(maxsize=1)
def _read_run(run_dir: Path, sizes: tuple[int, ...]) -> RunData:
    """The run, read again only when a file has grown."""
    return read_run(run_dir)


def read_view(run_dir: str | Path) -> tuple[RunData, list[RankView], bool]:
    """The run, its ranks, and whether it has ended and was not started again. Raises ConfigError if it is no run."""
    files = [Path(run_dir) / name for name in (METRICS_FILE, SUMMARY_FILE, CONFIG_FILE)]
    run = _read_run(Path(run_dir), tuple(file.stat().st_size if file.exists() else -1 for file in files))
    ranks = [read_rank(run.run_dir, rank) for rank in ranks_of(run.run_dir)]
    return run, ranks, run.is_finished and all(view.phase.startswith("after") for view in ranks)


def render(run: RunData, ranks: Sequence[RankView], is_over: bool, now: float) -> RenderableType:
    """The view: the run, its last steps, its ranks. `now`: seconds since the epoch."""
    steps = f"step {run.last_step}" + (f" of {run.num_steps}" if run.num_steps else "")
    last = max((view.seen for view in ranks), default=0.0)
    state = "finished" if is_over else f"last event {_ago(now - last)} ago" if last else "no event yet"
    head = f"{run.name}   {steps}   {len(ranks)} rank{'s' * (len(ranks) != 1)}   {state}"
    parts: list[RenderableType] = [Text(head, style="bold")]
    if run.evals:
        values = "  ".join(f"{row['step']}: {row.get('eval/pass@1') or 0:.3f}" for row in run.evals[-6:])
        parts.append(Text(f"held-out accuracy after step  {values}"))
    if run.steps:
        parts.append(steps_table({row["step"]: row for row in run.steps[-_ROWS:]}, **_BOX))
    if ranks:
        parts += [_phases(ranks, now, is_over), _ranks_table(ranks, now, is_over)]
    return Group(*parts)


def _ago(seconds: float) -> str:
    seconds = max(0.0, seconds)
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _phases(ranks: Sequence[RankView], now: float, is_over: bool) -> Text:
    """How many ranks are in which phase, and the requests of all of them."""
    text = Text("now   ")
    counts = Counter("ended" if is_over else view.phase for view in ranks)
    for phase, count in counts.most_common():
        text.append(f"{phase}: {count}   ", style=_STYLES.get(phase, ""))
    known = [view for view in ranks if view.running is not None and view.phase == "rollout"]
    if known and not is_over:
        running, waiting, tokens = (
            sum(getattr(view, name) or 0 for view in known) for name in ("running", "waiting", "tokens")
        )
        text.append(f"requests: {running} running, {waiting} waiting, {tokens} tokens so far")
    return text


def _ranks_table(ranks: Sequence[RankView], now: float, is_over: bool) -> Table:
    """A row a rank; of many ranks those with an error, then those without an event for longest."""
    title = None
    if len(ranks) > _RANKS:
        title = f"{_RANKS} of {len(ranks)} ranks: errors, then the longest without an event"
        ranks = sorted(ranks, key=lambda view: (view.error is None, view.seen, view.rank))[:_RANKS]
    heads = ("rank", "step", "phase", "for", "running", "waiting", "tokens", "idle s", "training s")
    table = Table(*heads, title=title, title_justify="left", **_BOX)
    for column in table.columns:
        column.justify = "left" if column.header == "phase" else "right"
    for view in ranks:
        phase = "ended" if is_over else view.phase
        name = Text(view.error, style="bold red") if view.error else Text(phase, style=_STYLES.get(phase, ""))
        since = "" if is_over or not view.since else _ago(now - view.since)
        counts = ["" if n is None else str(n) for n in (view.running, view.waiting, view.tokens)]
        step = "" if view.step is None or is_over else str(view.step + 1)
        table.add_row(str(view.rank), step, name, since, *counts, f"{view.idle:.1f}", f"{view.training:.1f}")
    return table


def watch(
    run_dir: str | Path, once: bool = False, every: float = 1.0, console: Console | None = None
) -> None:
    """Shows the run until it has ended or the user presses Ctrl-C. Raises ConfigError where there is none."""
    console = console or Console(highlight=False)
    view = read_view(run_dir)
    if once:
        console.print(render(*view, time.time()))
        return
    try:
        with Live(render(*view, time.time()), console=console, auto_refresh=False) as live:
            while not view[2]:
                time.sleep(every)
                view = read_view(run_dir)
                live.update(render(*view, time.time()), refresh=True)
    except KeyboardInterrupt:
        console.print("(the run continues)")
