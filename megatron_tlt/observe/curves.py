"""The running-requests curve of one rank's rollouts, as an event of bounded size. Torch-free.

The event: kind "instant", name "curve", attrs `{"start": seconds since the epoch, "running": [[ms after the start,
running requests], ...], "drafting": [share of each of 24 equal parts of the curve's time in which steps drafted]}`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from megatron_tlt.observe.clock import wall_seconds
from megatron_tlt.types import EngineStats

_POINTS = 40
_PARTS = 24
_WAITS = 60  # of a rank and step, that are logged


def curve_attrs(stats: EngineStats) -> dict[str, Any] | None:
    """Attributes of the event; None where the engine has no curve."""
    curve = stats.running_curve
    if not curve:
        return None
    wall = _wall_of(stats.started)
    first, last = curve[0][0], curve[-1][0]
    points = thinned(curve, _POINTS)
    attrs: dict[str, Any] = {"start": round(wall + first, 3)}
    attrs["running"] = [[round(1e3 * (at - first)), running] for at, running in points]
    switches = [(at - stats.started, drafts) for at, drafts in stats.speculation.switches]
    if switches:
        attrs["drafting"] = drafting_shares(switches, first, last, _PARTS)
    return attrs


def parked_spans(stats: EngineStats) -> Iterator[tuple[float, float]]:
    """(start in seconds since the epoch, seconds) of the longest waits of all requests for environments, in order."""
    longest = sorted(stats.parked_spans, key=lambda span: span[0] - span[1])[:_WAITS]
    for begin, end in sorted(longest):
        yield _wall_of(begin), end - begin


def _wall_of(seconds: float) -> float:
    """Seconds since the epoch, of time.perf_counter's."""
    return wall_seconds() - time.perf_counter() + seconds


def thinned(curve: Sequence[tuple[float, int]], most: int) -> list[tuple[float, int]]:
    """At most `most` points: half evenly by index (dense where much changes), half evenly in time (the tail)."""
    if len(curve) <= most:
        return list(curve)
    times = [at for at, _ in curve]
    by_index = np.linspace(0, len(curve) - 1, most // 2).round().astype(int)
    by_time = np.searchsorted(times, np.linspace(times[0], times[-1], most // 2), side="right") - 1
    return [curve[i] for i in np.union1d(by_index, by_time)]


def drafting_shares(switches: Sequence[tuple[float, bool]], first: float, last: float, parts: int) -> list[float]:
    """Share of each of `parts` equal parts of `first` to `last` in which steps drafted. `switches` rise in time."""
    if last <= first:
        return [0.0] * parts
    moments = np.clip([*(at for at, _ in switches), last], first, last)
    seconds = np.diff(moments) * [drafts for _, drafts in switches]  # of drafting behind each switch
    edges = np.linspace(first, last, parts + 1)
    drafted = np.interp(edges, moments, np.concatenate(([0.0], np.cumsum(seconds))))
    shares: list[float] = (np.diff(drafted) * parts / (last - first)).round(2).tolist()
    return shares
