"""What each rank did and when: spans and instants in run_dir/events/rank-00000.jsonl. Torch-free.

A line: `{"ts": seconds since the epoch at its start, "rank", "step", "kind": "span" | "instant" | "state", "name",
"dur": seconds (spans, states), "attrs": {...}}`. States (BUSY, IDLE, TRAINING) divide the rollout and idle
spans. Wall time places ranks beside each other; durations come from the monotonic clock. Lines are buffered and written
at the end of a step, when a span ends in an error, and at exit; with `observe.live` also when a phase begins (`enter`)
and now and then in a rollout (`running`), for `megatron-tlt watch`. A resumed run appends (with a new `open` instant):
what was done twice is there twice.
"""

from __future__ import annotations

import atexit
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_tlt.observe.clock import wall_seconds
from megatron_tlt.observe.jsonl import LineFile, read_rows, to_line

_BUFFERED_LINES = 512
_RUNNING_EVERY_S, _RUNNING_SHARE = 2.0, 0.05  # seconds between two counts, and share of the rollout so far


def events_path(run_dir: str | Path, rank: int) -> Path:
    """Where a rank's events are."""
    return Path(run_dir) / "events" / f"rank-{rank:05d}.jsonl"


class Span:
    """One timed block of an `EventLog`."""

    def __init__(self, log: EventLog, name: str, step: int | None, attrs: dict[str, Any]):
        self.log, self.name, self.step, self.attrs = log, name, step, attrs
        self.started = self.clock = 0.0

    def __enter__(self) -> dict[str, Any]:
        self.started, self.clock = wall_seconds(), time.perf_counter()
        return self.attrs

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.log.end_span(self, time.perf_counter() - self.clock, kind.__name__ if kind else None)


class EventLog:
    """Event log of one rank, and totals of its spans in memory."""

    def __init__(self, run_dir: str | Path, rank: int):
        self.rank = rank
        self.phase_totals: dict[str, float] = defaultdict(float)  # seconds by span name since the start
        self._step_totals: dict[str, float] = defaultdict(float)
        self._lines: list[str] = []
        self._rollout_began = self._counted = 0.0
        self._file = LineFile(events_path(run_dir, rank))
        atexit.register(self.close)
        self.instant("open", None)

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    def span(self, name: str, step: int | None, **attrs: Any) -> Span:
        """Times a `with` block. It yields `attrs`, to which the block may add."""
        return Span(self, name, step, attrs)

    def end_span(self, span: Span, seconds: float, error: str | None) -> None:
        """Called by `Span`. An error is written out at once: MPI_Abort may follow and runs no exit code."""
        self.phase_totals[span.name] += seconds
        self._step_totals[span.name] += seconds
        if error is not None:
            span.attrs["error"] = error
        self._add(span.started, span.step, "span", span.name, span.attrs, seconds)
        if error is not None:
            with suppress(OSError):  # on a full disk, the error that is on its way says more
                self.flush()

    def instant(self, name: str, step: int | None, **attrs: Any) -> None:
        """Notes that something happened now."""
        self._add(wall_seconds(), step, "instant", name, attrs)

    def enter(self, name: str, step: int | None) -> None:
        """Notes that phase `name` begins, and writes everything out: its span is written only when it ends."""
        self._rollout_began = self._counted = time.perf_counter()
        self.instant("enter", step, phase=name)
        self.flush()

    def running(self, step: int | None, running: int, waiting: int, tokens: int) -> None:
        """Notes how far a rollout is, seldom enough for any length of it, and writes it out."""
        now = time.perf_counter()
        if now - self._counted < max(_RUNNING_EVERY_S, _RUNNING_SHARE * (now - self._rollout_began)):
            return
        self._counted = now
        self.instant("running", step, running=running, waiting=waiting, tokens=tokens)
        self.flush()

    def state(self, name: str, step: int | None, started: float, seconds: float, **attrs: Any) -> None:
        """Notes that the rank was in state `name` for `seconds`, from `started` (seconds since the epoch) on.

        States lie within spans, so no phase's total counts them.
        """
        self._add(started, step, "state", name, attrs, seconds)

    def _add(
        self,
        ts: float,
        step: int | None,
        kind: str,
        name: str,
        attrs: dict[str, Any],
        dur: float | None = None,
    ) -> None:
        row: dict[str, Any] = {
            "ts": round(ts, 6),
            "rank": self.rank,
            "step": step,
            "kind": kind,
            "name": name,
        }
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
            self._file.write(lines)

    def close(self) -> None:
        """Flushes and closes; a second call does nothing."""
        if self._file.is_open:
            self.flush()
            self._file.close()
        atexit.unregister(self.close)

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_events(run_dir: str | Path, rank: int) -> list[dict[str, Any]]:
    """All events of one rank, in the order they were written; a torn last line is left out."""
    return list(read_rows(events_path(run_dir, rank)))
