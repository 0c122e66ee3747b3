"""Headline and table of a simulation, which the HTML report shows too; a simulation as text. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_tlt.errors import aligned
from megatron_tlt.observe.page import Cell, Table, cell_text
from megatron_tlt.sim.result import SIM_PHASES, Point, SimResult

_SHOWN = 0.005  # share of a step from which on a phase has a column
HUNDRED_STEPS = 100 / 3600  # hours of 100 steps for each second of one


def simulation_text(result: SimResult) -> str:
    """Headline, points and assumptions."""
    table = point_table(result)
    head, *lines = aligned([table.head, *([cell_text(cell) for cell in row] for row in table.rows)])
    points = "\n".join([f"{table.title}:", head, "-" * len(head), *lines])
    assumed = "assumed:\n" + "\n".join(f"  - {text}" for text in result.assumptions)
    return "\n\n".join(part for part in (result.name, headline(result), points, assumed) if part)


def point_table(result: SimResult) -> Table:
    """A row a point: seconds of a step by phase, speed-up, idle GPU-hours."""
    used = [name for name in SIM_PHASES if any(p.mean.phases[name] >= _SHOWN * p.seconds for p in result.points)]
    speedup = {(c.nodes, c.mode): c for c in result.comparisons}
    head = ["nodes", "GPUs", "mode", "step s", *used, "tokens/s", "rollout x", "e2e x"]
    head += ["idle GPU-h", "trained", "pre-rolled", "GPU-h", "pre-rolled tokens"]
    rows: list[list[Cell]] = []
    for p in result.points:
        found, mean = speedup.get((p.nodes, p.mode)), p.mean
        gains = [found.rollout, found.e2e] if found else [None, None]
        of = mean.idle_gpu_seconds, mean.recovered_gpu_seconds, mean.pre_rolling_gpu_seconds, p.gpus * p.seconds
        hours = [HUNDRED_STEPS * each for each in of]
        matching = f"{mean.matching_tokens / mean.tokens:.0%}" if mean.pre_rolling_gpu_seconds else None
        phases = [mean.phases[name] for name in used]
        rows.append([p.nodes, p.gpus, p.mode, p.seconds, *phases, mean.tokens / p.seconds, *gains, *hours, matching])
    return Table(head, rows, "Mean steps (GPU-hours: of 100 steps)", wide=True)


def headline(result: SimResult) -> str:
    """The best mode on the largest number of nodes; nothing if nothing was compared."""
    if not result.comparisons:
        return ""
    nodes = largest(result.points)[0].nodes
    best = max((c for c in result.comparisons if c.nodes == nodes), key=lambda c: c.e2e)
    if best.e2e < 1.005:
        return f"On {nodes_text(nodes)} nothing is faster than {best.baseline}."
    return (
        f"On {nodes_text(nodes)} {best.mode} is {best.e2e:.2f} times as fast as {best.baseline} end to end: "
        f"it saves {best.gpu_hours_saved_per_100_steps:,.4g} GPU-hours in 100 steps."
    )


def largest(points: Sequence[Point]) -> list[Point]:
    """Every mode on the largest number of nodes."""
    nodes = max(p.nodes for p in points)
    return [p for p in points if p.nodes == nodes]


def nodes_text(count: int) -> str:
    """ "1 node", "2 nodes"."""
    return f"{count} node{'s' if count > 1 else ''}"
