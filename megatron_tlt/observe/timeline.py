"""`megatron-tlt timeline`: every rank's events as a trace for Perfetto or Chrome. Torch-free.

The format is the JSON object of the Trace Event Format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
A process is a rank, its threads are phases, states and waits for environments, its counters are running requests and
the share of steps that draft. Memory holds one rank's events.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from megatron_tlt.errors import ConfigError, shortened
from megatron_tlt.observe.jsonl import JsonRow
from megatron_tlt.observe.runfiles import RunData

Event = dict[str, Any]
_PHASES = 1  # threads of a rank
_STATES = 2
_WAITS = 3


def write_timeline(run: RunData, out: Path, steps: Collection[int] | None = None) -> int:
    """Writes the trace, gzip; returns the number of events.

    `steps` (from 1) chooses; None: all. Raises ConfigError, before anything is written, where there is nothing to draw
    or none of it can be read.
    """
    if not run.ranks:
        raise ConfigError.of("RUN_DIR", str(run.run_dir), "has no event logs (events/rank-*.jsonl) to draw")
    if steps is not None and not any(1 <= step <= run.last_step + 1 for step in steps):
        allowed = f"must be among the run's steps: 1 to {run.last_step}, and the one in progress"
        raise ConfigError.of("--steps", shortened(sorted(steps)), allowed)
    starts = [row["ts"] for rank in run.ranks for row in [next(run.events(rank), None)] if row is not None]
    if not starts:
        found = "; ".join(run.warnings) or "the event logs are empty"
        raise ConfigError.of("RUN_DIR", str(run.run_dir), f"no event could be read: {found}")
    events = chain(*(_rank_events(run, rank, min(starts), steps) for rank in run.ranks))
    out.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with gzip.open(out, "wt", encoding="utf-8", compresslevel=6) as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        for event in events:
            file.write(",\n" if count else "\n")
            file.write(json.dumps(event, separators=(",", ":"), allow_nan=False))
            count += 1
        file.write("\n]}\n")
    return count


def _names(pid: int, process: str, threads: dict[int, str]) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for tid, name in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _rank_events(run: RunData, rank: int, origin: float, steps: Collection[int] | None) -> Iterator[Event]:
    """One rank's events, in microseconds since `origin`."""
    slices: dict[int, list[Event]] = {_PHASES: [], _STATES: [], _WAITS: []}
    for row in run.events(rank, lambda step: steps is None or step + 1 in steps):
        step = row.get("step")
        name = row["name"]
        attrs = row.get("attrs", {})
        if steps is not None and (step is None or step + 1 not in steps):
            continue
        base = {"name": name, "pid": rank, "ts": _micros(row["ts"] - origin)}
        if row.get("kind") in ("span", "state"):
            thread = _PHASES if row["kind"] == "span" else _WAITS if name == "WAITING" else _STATES
            args = attrs if step is None else {"step": step + 1, **attrs}
            times = {"cat": row["kind"], "tid": thread, "dur": _micros(row["dur"])}
            slices[thread].append({"ph": "X", **base, **times, "args": args})
        elif name == "curve":
            yield from _curve(rank, attrs, origin)
        else:
            yield {"ph": "i", "s": "t", "tid": _PHASES, "cat": "instant", **base, "args": attrs}
    threads = {_PHASES: "phases", _STATES: "state"} | ({_WAITS: "environments"} if slices[_WAITS] else {})
    yield from _names(rank, f"rank {rank}", threads)
    for rows in slices.values():
        yield from one_after_the_other(rows)


def one_after_the_other(slices: Iterable[Event]) -> list[Event]:
    """Slices of one thread by start, each cut where the next one starts. Mutates them.

    Phases follow each other, and so do states: only rounding and different clocks make them overlap.
    """
    ordered = sorted(slices, key=lambda event: (event["ts"], event["dur"]))
    for event, following in pairwise(ordered):
        event["dur"] = min(event["dur"], following["ts"] - event["ts"])
    return ordered


def _curve(rank: int, attrs: JsonRow, origin: float) -> Iterator[Event]:
    start, points = attrs["start"] - origin, attrs["running"]
    for ms, running in points:
        yield _counter(rank, "running requests", _micros(start + ms / 1e3), running=running)
    shares = attrs.get("drafting", [])
    width = points[-1][0] / 1e3 / max(1, len(shares))
    for part, share in enumerate([*shares, 0] if shares else []):
        yield _counter(rank, "steps that draft", _micros(start + part * width), share=share)


def _counter(pid: int, name: str, ts: int, **args: float) -> Event:
    return {"ph": "C", "name": name, "pid": pid, "ts": ts, "args": args}


def _micros(seconds: float) -> int:
    """Whole microseconds; a time before the first event (the clock was set back before a restart) becomes 0."""
    return max(0, round(1e6 * seconds))
