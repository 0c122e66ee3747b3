"""`megatron-tlt watch`: a run on the terminal while it goes on. Reads the files that the run writes; torch-free.

Event logs are followed: each look reads what has been added since the last one. How fresh they are is up to the run
(`observe.live`): without it ranks write at the end of a step only.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megatron_tlt.observe.events import events_path
from megatron_tlt.observe.metrics import METRICS_FILE
from megatron_tlt.observe.progress import COLUMNS
from megatron_tlt.observe.runfiles import Row, RunData, parse, ranks_of, read_run

_FIRST_LOOK = 1 << 14  # bytes of each log's end
_RANKS = 16  # shown one by one; of more, the most interesting ones
_ROWS = 8  # of steps
_LEFT_OUT = {"policy/entropy", "policy/grad_norm", "drafter/steps"}  # so that the others fit into 80 columns
_STYLES = {"rollout": "blue", "idle": "yellow", "update": "green", "eval": "magenta", "ended": "dim"}


class Tail:
    """Follows a file of JSON lines."""

    def __init__(self, path: Path, first_look: int | None = None):
        """With `first_look` the first read begins so many bytes before the end."""
        self._path, self._first_look = path, first_look
        self._at = 0
        self._rest = b""

    def read(self) -> list[Row]:
        """Rows since the last call. A line that is not finished comes next time."""
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            return []
        if size < self._at:  # a new run in the same directory
            self._at, self._rest = 0, b""
        if self._first_look is not None:
            self._at, self._first_look = max(0, size - self._first_look), None
        with self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [row for line in lines if (row := parse(line)) is not None]


@dataclass
class RankView:
    """What is known of a rank now."""

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
    """Seconds of the last step that it has ended."""
    training: float = 0.0
    seen: float = 0.0
    """Seconds since the epoch of its last event."""
    error: str | None = None
    _states: dict[str, float] = field(default_factory=dict)

    def take(self, row: Row) -> None:
        """One event more."""
        name, kind, attrs = row["name"], row.get("kind"), row.get("attrs", {})
        self.seen = max(self.seen, row["ts"] + row.get("dur", 0.0))
        if name == "open":
            self.phase, self.since, self.error = "start", row["ts"], None
        elif name == "enter":
            self._begin(str(attrs.get("phase", "?")), row)
        elif name == "running":
            self.running, self.waiting, self.tokens = (attrs.get(n) for n in ("running", "waiting", "tokens"))
        elif kind == "state" and name in ("IDLE", "TRAINING"):
            self._states[name] = self._states.get(name, 0.0) + row["dur"]
        elif kind == "span":
            self._end(name, row, attrs)

    def _begin(self, phase: str, row: Row) -> None:
        self.phase, self.step, self.since = phase, row.get("step"), row["ts"]
        self.running = self.waiting = self.tokens = None

    def _end(self, name: str, row: Row, attrs: dict[str, Any]) -> None:
        if "error" in attrs:
            self.error = f"{name}: {attrs['error']}"
        if name == "idle":
            self.idle, self.training = (self._states.pop(state, 0.0) for state in ("IDLE", "TRAINING"))
        if name == self.phase or row["ts"] >= self.since:
            self._begin(f"after {name}", row)


class Watcher:
    """Looks at a run again and again."""

    def __init__(self, run_dir: str | Path):
        """Raises ConfigError where there is no run."""
        self.run_dir = Path(run_dir)
        self.run: RunData = read_run(run_dir)
        self.ranks: dict[int, RankView] = {}
        self._tails: dict[int, Tail] = {}
        self._changed: tuple[float, ...] = ()
        self.look()

    def look(self) -> None:
        """Takes what is new."""
        changed = tuple(
            _changed_at(self.run_dir / name) for name in (METRICS_FILE, "summary.json", "config.json")
        )
        if changed != self._changed:
            self._changed, self.run = changed, read_run(self.run_dir)
        for rank in ranks_of(self.run_dir):
            if rank not in self._tails:
                self._tails[rank] = Tail(events_path(self.run_dir, rank), _FIRST_LOOK)
                self.ranks[rank] = RankView(rank)
            for row in self._tails[rank].read():
                self.ranks[rank].take(row)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, and nobody has started it again."""
        return self.run.is_finished and all(view.phase.startswith("after") for view in self.ranks.values())


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def render(run: RunData, ranks: Sequence[RankView], now: float, is_over: bool = False) -> RenderableType:
    """The view: the run, its last steps, its ranks. `now`: seconds since the epoch."""
    steps = f"step {run.last_step}" + (f" of {run.num_steps}" if run.num_steps else "")
    last = max((view.seen for view in ranks), default=0.0)
    state = "finished" if is_over else f"last event {_ago(now - last)} ago" if last else "no event yet"
    head = Text(f"{run.name}   {steps}   {len(ranks)} rank{'s' * (len(ranks) != 1)}   {state}", style="bold")
    parts: list[RenderableType] = [head]
    if run.evals:
        values = "  ".join(f"{row['step']}: {row.get('eval/pass@1', 0):.3f}" for row in run.evals[-6:])
        parts.append(Text(f"held-out accuracy after step  {values}"))
    if run.steps:
        parts.append(_steps_table(run))
    if ranks:
        parts.append(_phases(ranks, now, is_over))
        parts.append(_ranks_table(ranks, now, is_over))
    return Group(*parts)


def _ago(seconds: float) -> str:
    seconds = max(0.0, seconds)
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _steps_table(run: RunData) -> Table:
    rows = run.steps[-_ROWS:]
    columns = [column for column in COLUMNS if column[1] not in _LEFT_OUT]
    shown = [
        (head, key, form) for head, key, form in columns if any(row.get(key) is not None for row in rows)
    ]
    heads = ("step", "seconds", "tokens/s", *(head for head, _, _ in shown))
    table = Table(*heads, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        cells = [form.format(row[key]) if row.get(key) is not None else "" for _, key, form in shown]
        seconds, speed = row.get("time/step"), row.get("engine/tokens_per_s")
        texts = (f"{seconds:.1f}" if seconds is not None else "", f"{speed:.0f}" if speed is not None else "")
        table.add_row(str(row["step"]), *texts, *cells)
    return table


def _shown_phase(view: RankView, is_over: bool) -> str:
    return "ended" if is_over else view.phase


def _phases(ranks: Sequence[RankView], now: float, is_over: bool) -> Text:
    """How many ranks are in which phase, and what all of them run."""
    counts = Counter(_shown_phase(view, is_over) for view in ranks)
    text = Text("now   ")
    for phase, count in counts.most_common():
        text.append(f"{phase}: {count}   ", style=_STYLES.get(phase, ""))
    known = [view for view in ranks if view.running is not None and view.phase == "rollout"]
    if known and not is_over:
        running, waiting, tokens = (
            sum(getattr(view, name) or 0 for view in known) for name in ("running", "waiting", "tokens")
        )
        text.append(f"requests: {running} running, {waiting} waiting, {tokens} tokens so far")
    return text


def chosen(ranks: Sequence[RankView]) -> list[RankView]:
    """The ranks to show: all, or of many those with an error, then those that have been in their phase longest."""
    if len(ranks) <= _RANKS:
        return sorted(ranks, key=lambda view: view.rank)
    return sorted(ranks, key=lambda view: (view.error is None, view.seen, view.rank))[:_RANKS]


def _ranks_table(ranks: Sequence[RankView], now: float, is_over: bool) -> Table:
    shown = chosen(ranks)
    title = (
        None
        if len(shown) == len(ranks)
        else f"{len(shown)} of {len(ranks)} ranks: errors, then the longest silent"
    )
    heads = ("rank", "step", "phase", "for", "running", "waiting", "tokens", "idle s", "training s")
    table = Table(*heads, title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index in (0, 1, 3, 4, 5, 6, 7, 8):
        table.columns[index].justify = "right"
    for view in shown:
        phase = _shown_phase(view, is_over)
        name = Text(view.error, style="bold red") if view.error else Text(phase, style=_STYLES.get(phase, ""))
        since = "" if is_over or not view.since else _ago(now - view.since)
        counts = ["" if n is None else str(n) for n in (view.running, view.waiting, view.tokens)]
        step = "" if view.step is None or is_over else str(view.step + 1)
        table.add_row(str(view.rank), step, name, since, *counts, f"{view.idle:.1f}", f"{view.training:.1f}")
    return table


def watch(
    run_dir: str | Path, once: bool = False, every: float = 1.0, console: Console | None = None
) -> None:
    """Shows the run until it has ended or somebody presses Ctrl-C. Raises ConfigError where there is none."""
    console = console or Console(highlight=False)
    watcher = Watcher(run_dir)

    def view() -> RenderableType:
        return render(watcher.run, list(watcher.ranks.values()), time.time(), watcher.is_over)

    if once:
        console.print(view())
        return
    try:
        with Live(view(), console=console, auto_refresh=False) as live:
            while not watcher.is_over:
                time.sleep(every)
                watcher.look()
                live.update(view(), refresh=True)
    except KeyboardInterrupt:
        console.print("(the run goes on)")
