"""Cost curves of `proof.py`: seconds of a step by responses a step, response length, policy and ranks, with TLT on.

Each axis varies one value around `BASE`; a slope is the exponent b of seconds ~ x^b, fitted to logarithms by least
squares, for the rollout (with the wait for the slowest rank), the update and the whole step. More ranks than cores
share them: those points show the price of that, not of ranks.
"""

from __future__ import annotations

import math
import os
import statistics
from typing import TYPE_CHECKING, Any

from lib.training_runs import Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proof import Bench

BASE: dict[str, int] = {"responses": 16, "length": 900, "hidden": 256, "ranks": 2}
AXES: dict[str, tuple[int, ...]] = {
    "responses": (8, 16, 32),
    "length": (225, 450, 900),
    "hidden": (128, 256, 512),
    "ranks": (1, 2, 4),
}
SAMPLES = 4  # rollout.samples_per_prompt of proof.yaml
STEPS = 4  # of a job; the first is not timed
PARTS = ("rollout", "update", "step")


def curves(bench: Bench) -> tuple[Rows, dict[str, float]]:
    """A row a point, and the slopes."""
    points = {tuple({**BASE, axis: x}.items()) for axis, values in AXES.items() for x in values}
    measured = {point: measure(bench, dict(point)) for point in sorted(points)}
    rows, slopes = [], {}
    for axis, values in AXES.items():
        seconds = [measured[tuple({**BASE, axis: x}.items())] for x in values]
        print(
            f"\nseconds of a step by {axis}: "
            + ", ".join(f"{x}: {s['step']:.2f}" for x, s in zip(values, seconds))
        )
        rows += [{"part": "curves", "axis": axis, "x": x, **s} for x, s in zip(values, seconds, strict=True)]
        for part in PARTS:
            slopes[f"slope_{part}_{axis}"] = slope(values, [s[part] for s in seconds])
    return rows, slopes


def measure(bench: Bench, point: dict[str, int]) -> dict[str, Any]:
    """Median seconds of the timed steps at one point."""
    options = [
        f"train.prompts_per_step={point['responses'] // SAMPLES}",
        f"rollout.max_tokens={point['length']}",
    ]
    timed = bench.job("curves", point["hidden"], "on", options, steps=STEPS, ranks=point["ranks"])
    found: dict[str, Any] = {
        "rollout": statistics.median(row["time/rollout"] + row["time/idle"] for row in timed),
        "update": statistics.median(row["time/update"] for row in timed),
        "step": statistics.median(row["time/step"] for row in timed),
        "tokens": statistics.mean(row["engine/generated_tokens"] for row in timed),
    }
    return {**found, "oversubscribed": point["ranks"] > (os.cpu_count() or 1)}


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Exponent of a power law through the points."""
    logs = [(math.log(x), math.log(max(y, 1e-9))) for x, y in zip(xs, ys, strict=True)]
    mean_x, mean_y = (statistics.mean(values) for values in zip(*logs, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs)
