"""Headline and tables of a simulation, which the HTML report shows too; a simulation as text. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_tlt.errors import aligned
from megatron_tlt.observe.page import Cell, Table, cell_text
from megatron_tlt.sim.result import SIM_PHASES, Point, SimResult

_SHOWN = 0.005  # share of a step from which on a phase has a column


def simulation_text(result: SimResult) -> str:
    """Headline, points, decisions and assumptions."""
    decisions = decision_table(result)
    parts = [result.name, headline(result), _text(point_table(result)), _text(decisions) if decisions else ""]
    parts.append("assumed:\n" + "\n".join(f"  - {text}" for text in result.assumptions))
    return "\n\n".join(part for part in parts if part)


def point_table(result: SimResult) -> Table:
    """A row a point: seconds of a step by phase, speed-up, idle GPU-hours."""
    used = [name for name in SIM_PHASES if any(p.phases[name] >= _SHOWN * p.seconds for p in result.points)]
    speedup = {(c.nodes, c.mode): c for c in result.comparisons}
    head = ["nodes", "GPUs", "mode", "step s", *used, "tokens/s", "tokens a draft step", "rollout x", "e2e x"]
    head += ["idle GPU-h", "trained", "pre-rolled", "GPU-h", "pre-rolled tokens"]
    rows: list[list[Cell]] = []
    for p in result.points:
        found = speedup.get((p.nodes, p.mode))
        hundred = 100 / len(p.steps)
        gains = [found.rollout, found.e2e] if found else [None, None]
        of = p.idle_gpu_hours, p.recovered_gpu_hours, p.pre_rolling_gpu_hours, p.gpu_hours
        hours = [hundred * each for each in of]
        matching = f"{p.matching:.0%}" if p.pre_rolling_gpu_hours else None
        drafted = p.accept_length or None  # 0: nothing was drafted
        phases = [p.phases[name] for name in used]
        rows.append(
            [p.nodes, p.gpus, p.mode, p.seconds, *phases, p.tokens_per_second, drafted, *gains, *hours, matching]
        )
    return Table(head, rows, "Mean steps (GPU-hours: of 100 steps)", wide=True)


def decision_table(result: SimResult) -> Table | None:
    """The selector's choice at each number of running requests, of the last point that speculates; None: none does."""
    speculating = [p for p in result.points if any(s.accept_length for s in p.strategies)]
    if not speculating:
        return None
    rows: list[list[Cell]] = []
    for s in speculating[-1].strategies:
        name = max(s.shares, key=lambda k: s.shares[k])
        gain = s.tokens_per_second / s.plain_tokens_per_second
        most = f"{name} ({s.shares[name]:.0%})"
        drafted = s.accept_length or None
        rows.append([s.running, s.tokens_per_second, s.plain_tokens_per_second, gain, drafted, most])
    head = ["running requests", "tokens/s", "plain", "x", "tokens a draft step", "chosen most often"]
    return Table(head, rows, f"One replica, mode {speculating[-1].mode}", wide=True)


def _text(table: Table) -> str:
    rows = [table.head, *([cell_text(cell) for cell in row] for row in table.rows)]
    return f"{table.title}:\n{columns(rows)}"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells under each other, numbers to the right; the first row is the heading."""
    head, *lines = aligned(rows)
    return "\n".join([head, "-" * len(head), *lines])


def headline(result: SimResult) -> str:
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
