"""The running-requests curve of one rank's rollouts, as an event of bounded size. Torch-free.

The event: kind "instant", name "curve", attrs `{"start": seconds since the epoch, "running": [[ms after the start,
running requests], ...], "drafting": [share of each of 24 equal parts of the curve's time in which steps drafted]}`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from megatron_tlt.observe.clock import wall_seconds
from megatron_tlt.types import EngineStats

_POINTS = 40
_PARTS = 24


def curve_attrs(stats: EngineStats) -> dict[str, Any] | None:
    """Attributes of the event; None where the engine has no curve."""
    curve = stats.running_curve
    if not curve:
        return None
    wall = wall_seconds() - time.perf_counter() + stats.started
    first, last = curve[0][0], curve[-1][0]
    points = thinned(curve, _POINTS)
    attrs: dict[str, Any] = {"start": round(wall + first, 3)}
    attrs["running"] = [[round(1e3 * (at - first)), running] for at, running in points]
    switches = [(at - stats.started, drafts) for at, drafts in stats.speculation.switches]
    if switches:
        attrs["drafting"] = drafting_shares(switches, first, last, _PARTS)
    return attrs


def thinned(curve: Sequence[tuple[float, int]], most: int) -> list[tuple[float, int]]:
    """At most `most` points: half evenly by index (dense where much changes), half evenly in time (the tail)."""
    if len(curve) <= most:
        return list(curve)
    half = most // 2
    chosen = {round(i * (len(curve) - 1) / (half - 1)) for i in range(half)}
    first, last = curve[0][0], curve[-1][0]
    at = 0
    for part in range(half):
        until = first + (last - first) * part / half
        while at + 1 < len(curve) and curve[at + 1][0] <= until:
            at += 1
        chosen.add(at)
    return [curve[i] for i in sorted(chosen)]


def drafting_shares(
    switches: Sequence[tuple[float, bool]], first: float, last: float, parts: int
) -> list[float]:
    """Share of each of `parts` equal parts of `first` to `last` in which steps drafted. `switches` rise in time."""
    width = (last - first) / parts
    if width <= 0:
        return [0.0] * parts
    totals = [0.0] * parts
    ends = [at for at, _ in switches[1:]] + [last]
    for (switched, drafts), until in zip(switches, ends, strict=True):
        begin, end = max(switched, first), min(until, last)
        if not drafts or end <= begin:
            continue
        for part in range(int((begin - first) / width), min(parts - 1, int((end - first) / width)) + 1):
            low = first + part * width
            totals[part] += max(0.0, min(end, low + width) - max(begin, low))
    return [round(min(1.0, total / width), 2) for total in totals]
