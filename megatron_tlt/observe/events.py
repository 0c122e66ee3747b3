"""Spans and instants of each rank in run_dir/events/rank-00000.jsonl. Torch-free.

A line: `{"ts": seconds since the epoch at its start, "rank", "step", "kind": "span" | "instant" | "state", "name",
"dur": seconds (spans, states), "attrs": {...}}`. Spans are the phases of a step, one after the other; states (BUSY,
IDLE, TRAINING, PRE_ROLLING) divide the rollout and idle spans. WAITING, within BUSY, are the longest waits in which all
requests of the rank wait for their environments. Lines are buffered and written at the end of a step, when a span ends
in an error, and at exit. A resumed run appends, after a new `open` instant: steps done again are repeated, but not of
ranks that are no more. The present state of a rank is in RUN_DIR/status (`resilience/heartbeat.py`).
"""

from __future__ import annotations

import atexit
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron_tlt.observe.clock import wall_seconds
from megatron_tlt.observe.files import write_atomically
from megatron_tlt.observe.jsonl import JsonRow, LineFile, cut_back_ranks, rank_file, read_rows, to_line

_BUFFERED_LINES = 512
_STEP = re.compile(rb'\{"ts":[\d.]+,"rank":\d+,"step":(\d+),')  # how `EventLog` begins a line of a step


def events_path(run_dir: str | Path, rank: int) -> Path:
    """Path of a rank's events."""
    return rank_file(Path(run_dir) / "events", rank)


class EventLog:
    """Event log of one rank, and seconds of its spans in memory."""

    def __init__(self, run_dir: str | Path, rank: int):
        self.rank = rank
        self._step_totals: dict[str, float] = defaultdict(float)
        self._lines: list[str] = []
        self._path = events_path(run_dir, rank)
        self._file = LineFile(self._path)
        atexit.register(self.close)
        self.instant("open", None)

    def start(self, steps_done: int, num_ranks: int) -> None:
        """Before the first span: removes an earlier run's lines; rank 0 those of ranks that this start lacks, which a
        resumed run does not repeat.
        """
        if not steps_done:
            self._file.truncate(0)
        if self.rank == 0:
            cut_back_ranks(self._path.parent, num_ranks, steps_done, _cut)

    @contextmanager
    def span(self, name: str, step: int | None) -> Iterator[None]:
        """Times a `with` block. If the block raises, the lines are written at once: MPI_Abort may follow and runs no
        exit handlers.
        """
        attrs: JsonRow = {}
        started, begin = wall_seconds(), time.perf_counter()
        try:
            yield
        except BaseException as error:
            attrs["error"] = type(error).__name__
            raise
        finally:
            seconds = time.perf_counter() - begin
            self._step_totals[name] += seconds
            self._add(started, step, "span", name, attrs, seconds)
            if "error" in attrs:
                with suppress(OSError):  # of a full disk; the block's own error matters more
                    self.flush()

    def instant(self, name: str, step: int | None, **attrs: Any) -> None:
        """Logs something that happened now."""
        self._add(wall_seconds(), step, "instant", name, attrs)

    def state(self, name: str, step: int | None, started: float, seconds: float) -> None:
        """Logs that the rank was in state `name` for `seconds`, from `started` (seconds since the epoch) on.

        States lie within spans, so no phase's total counts them.
        """
        self._add(started, step, "state", name, {}, seconds)

    def _add(self, ts: float, step: int | None, kind: str, name: str, attrs: JsonRow, dur: float | None = None) -> None:
        row: JsonRow = {"ts": round(ts, 6), "rank": self.rank, "step": step, "kind": kind, "name": name}
        if dur is not None:
            row["dur"] = round(dur, 6)
        if attrs:
            row["attrs"] = attrs
        self._lines.append(to_line(row))
        if len(self._lines) >= _BUFFERED_LINES:
            self.flush()

    def end_step(self) -> dict[str, float]:
        """Seconds of each span name since the last call; writes the buffer out and starts counting anew."""
        totals, self._step_totals = dict(self._step_totals), defaultdict(float)
        self.flush()
        return totals

    def flush(self) -> None:
        """Writes buffered lines."""
        lines, self._lines = self._lines, []
        if lines:
            self._file.write_lines(lines)

    def close(self) -> None:
        """Flushes and closes; a second call does nothing."""
        if not self._file.closed:
            self.flush()
            self._file.close()
        atexit.unregister(self.close)


def _cut(path: Path, steps_done: int) -> None:
    """Removes the lines of later steps, wherever they are: those of every start follow each other."""
    kept = (row for row in read_rows(path) if (row.get("step") or 0) < steps_done)
    write_atomically(path, (to_line(row).rstrip("\n") for row in kept))


def step_of(line: bytes) -> int | None:
    """The step of a line that `EventLog` has written, without parsing it; None: it has none, or is torn."""
    begin = _STEP.match(line)
    is_whole = line.endswith(b"}\n") and line.count(b"{") == line.count(b"}")
    return int(begin[1]) if begin and is_whole else None
