"""`megatron-tlt timeline`: every rank's events as a trace for Perfetto or Chrome. Torch-free; reads files only.

The format is the JSON object of the Trace Event Format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
A process is a rank, its threads are phases and states, its counters are running requests and whether steps draft. One
more process is the run: counters by step of reward, accepted length and strategies. Events are written rank by rank, so
memory holds one rank's.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any

from megatron_tlt.errors import ConfigError
from megatron_tlt.observe.events import events_path
from megatron_tlt.observe.jsonl import read_rows
from megatron_tlt.observe.runfiles import RunData, read_run

Event = dict[str, Any]
PHASES, STATES = 1, 2  # threads of a rank
_SKIPPED = {"enter"}  # a span tells the same
_OVERLAP_US = 2000  # by which an inner slice may end too late: two clocks


def write_timeline(
    run_dir: str | Path, out: Path, steps: Collection[int] | None = None, ranks: Collection[int] | None = None
) -> int:
    """Writes the trace (gzip unless `out` ends in .json); returns the number of events. Raises ConfigError.

    `steps` (from 1) and `ranks` choose; None: all.
    """
    run = read_run(run_dir)
    if not run.ranks:
        raise ConfigError.of("RUN_DIR", str(run_dir), "has no event logs (events/rank-*.jsonl) to draw")
    if steps is not None and not any(1 <= step <= run.last_step + 1 for step in steps):
        allowed = f"must be among the run's steps: 1 to {run.last_step}, and the one in progress"
        raise ConfigError.of("--steps", _spans(steps), allowed)
    chosen = [rank for rank in run.ranks if ranks is None or rank in ranks]
    if not chosen:
        raise ConfigError.of(
            "--ranks", sorted(ranks or []), f"must be among the run's ranks: {run.ranks[:20]}"
        )
    origin = min(filter(math.isfinite, (_first_time(run, rank) for rank in chosen)), default=0.0)
    out.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with _opened(out) as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        for event in _events(run, chosen, origin, steps):
            file.write(
                ("\n" if not count else ",\n") + json.dumps(event, separators=(",", ":"), allow_nan=False)
            )
            count += 1
        about = {"run": run.name, "origin_s": origin}
        file.write('\n],"otherData":' + json.dumps(about) + "}\n")
    return count


def _spans(steps: Collection[int]) -> str:
    """The first and the last."""
    return f"{min(steps)}-{max(steps)}" if len(steps) > 1 else str(*steps)


def _opened(out: Path) -> IO[str]:
    if out.suffix == ".json":
        return out.open("w", encoding="utf-8")
    return gzip.open(out, "wt", encoding="utf-8", compresslevel=6)


def _first_time(run: RunData, rank: int) -> float:
    for row in read_rows(events_path(run.run_dir, rank)):
        return float(row["ts"])
    return math.inf


def _events(
    run: RunData, ranks: Collection[int], origin: float, steps: Collection[int] | None
) -> Iterator[Event]:
    for rank in ranks:
        yield from _names(rank, f"rank {rank}", {PHASES: "phases", STATES: "state"})
        yield from rank_events(run.run_dir, rank, origin, steps)
    pid = max(run.ranks) + 1
    yield from _names(pid, f"run {run.name}", {})
    yield from _run_counters(run, pid, origin, steps)


def _names(pid: int, process: str, threads: dict[int, str]) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for tid, name in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


def rank_events(
    run_dir: Path, rank: int, origin: float, steps: Collection[int] | None = None
) -> Iterator[Event]:
    """One rank's events, in microseconds since `origin`."""
    slices: dict[int, list[Event]] = {PHASES: [], STATES: []}
    for row in read_rows(events_path(run_dir, rank)):
        step = row.get("step")
        if steps is not None and (step is None or step + 1 not in steps):
            continue
        base = {"name": row["name"], "pid": rank, "ts": _micros(row["ts"] - origin)}
        attrs = dict(row.get("attrs", {}))
        if row["kind"] in ("span", "state"):
            thread = PHASES if row["kind"] == "span" else STATES
            args = attrs if step is None else {"step": step + 1, **attrs}
            slices[thread].append(
                {
                    "ph": "X",
                    "cat": row["kind"],
                    "tid": thread,
                    "dur": _micros(row["dur"]),
                    **base,
                    "args": args,
                }
            )
        elif row["name"] == "curve":
            yield from _curve(rank, attrs, origin)
        elif row["name"] == "running":
            yield {
                "ph": "C",
                **base,
                "name": "waiting requests",
                "args": {"waiting": attrs.get("waiting", 0)},
            }
        elif row["name"] not in _SKIPPED:
            yield {"ph": "i", "s": "t", "tid": PHASES, "cat": "instant", **base, "args": attrs}
    for rows in slices.values():
        yield from nested(rows)


def nested(slices: list[Event]) -> list[Event]:
    """Slices of one thread by start, each within the one around it or behind the one before it.

    A rank does one thing at a time, so where one reaches into the next, rounding or two clocks did it: it is cut.
    """
    ordered = sorted(slices, key=lambda event: (event["ts"], -event["dur"]))
    around: list[Event] = []
    for event in ordered:
        while around:
            over = (
                around[-1]["ts"] + around[-1]["dur"] - event["ts"]
            )  # what is left of the slice around this one
            if over > 0 and event["dur"] <= over:
                break
            if over > _OVERLAP_US and event["dur"] - over <= _OVERLAP_US:
                event["dur"] = over
                break
            around[-1]["dur"] -= max(0, over)
            around.pop()
        around.append(event)
    return ordered


def _curve(rank: int, attrs: dict[str, Any], origin: float) -> Iterator[Event]:
    start, points = attrs["start"] - origin, attrs["running"]
    for ms, running in points:
        yield _counter(rank, "running requests", _micros(start + ms / 1e3), running=running)
    shares = attrs.get("drafting", [])
    width = points[-1][0] / 1e3 / max(1, len(shares))
    for part, share in enumerate([*shares, 0] if shares else []):
        yield _counter(rank, "steps that draft", _micros(start + part * width), share=share)


def _run_counters(run: RunData, pid: int, origin: float, steps: Collection[int] | None) -> Iterator[Event]:
    ends = {}  # of steps, when their row was written
    for row in run.steps:
        if steps is not None and row["step"] not in steps:
            continue
        ends[row["step"]] = at = _micros(row["time"] - origin)
        for name in ("reward/mean", "spec/accept_length"):
            if row.get(name) is not None:
                yield _counter(pid, name, at, value=row[name])
    for row in run.rollouts:
        if row["step"] in ends and row.get("strategies"):
            yield _counter(pid, "steps by strategy", ends[row["step"]], **row["strategies"])


def _counter(pid: int, name: str, ts: int, **args: float) -> Event:
    return {"ph": "C", "name": name, "pid": pid, "ts": ts, "args": args}


def _micros(seconds: float) -> int:
    """Whole microseconds; a time before the first event (a clock that was set back) becomes 0."""
    return max(0, round(1e6 * seconds))
