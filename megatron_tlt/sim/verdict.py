"""A simulation in a sentence: what page and tables begin with. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_tlt.sim.result import Point, SimResult


def verdict(result: SimResult) -> str:
    """The best mode on the largest number of nodes; nothing if nothing was compared."""
    if not result.comparisons:
        return ""
    most = largest(result.points)
    nodes = most[0].nodes
    best = max((c for c in result.comparisons if c.nodes == nodes), key=lambda c: c.e2e)
    saved = best.gpu_hours_saved_per_100_steps
    said = (
        f"On {nodes_text(nodes)} {best.mode} is {best.e2e:.2f} times as fast as {best.baseline} end to end: "
        f"it saves {saved:,.4g} GPU-hours in 100 steps."
    )
    if best.e2e < 1.005:
        said = f"On {nodes_text(nodes)} nothing is faster than {best.baseline}."
    return said


def largest(points: Sequence[Point]) -> list[Point]:
    """Every mode on the largest number of nodes."""
    nodes = max(p.nodes for p in points)
    return [p for p in points if p.nodes == nodes]


def nodes_text(count: int) -> str:
    """ "1 node", "2 nodes"."""
    return f"{count} node{'s' if count > 1 else ''}"
