"""A simulation as one self-contained HTML page, of the same building blocks as a run's report. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_tlt.observe import colours
from megatron_tlt.observe.page import Chart, Page, PageSection, Part, Stat, Table, Trace, bar, line
from megatron_tlt.sim.result import SIM_PHASES, Point, SimResult
from megatron_tlt.sim.tables import decision_table, headline, largest, nodes_text, point_table

_COLOURS = {
    "rollout": colours.BLUE,
    "stop": colours.GREY,
    "score": colours.OLIVE,
    "logprobs": colours.PURPLE,
    "update": colours.GREEN,
    "merge": colours.AMBER,
    "weight_sync": colours.BROWN,
    "other": colours.RED,
}
_OF_MODE = {
    "off": colours.BLUE,
    "suffix": colours.ORANGE,
    "frozen": colours.PURPLE,
    "tlt": colours.GREEN,
}  # the same in every chart


def write_report(result: SimResult, path: Path) -> None:
    """Writes the page, making its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(build_page(result).html(), encoding="utf-8")


def build_page(result: SimResult) -> Page:
    """The page, its headline first."""
    page = Page(result.name, "simulated, not measured: the assumptions are at the end")
    page.headline = headline(result)
    page.stats = _stats(result)
    decisions = decision_table(result)
    page.sections = [
        PageSection("Step time", _times(result)),
        PageSection("Speed-up", _speedups(result)),
        PageSection("Idle time", _idle(result)),
        PageSection(
            "One rollout", _rollout(result.points), "The last simulated step, on the largest number of nodes."
        ),
        PageSection("Decisions", [decisions] if decisions else []),
        PageSection("Assumptions", [Table(["assumed"], [[text] for text in result.assumptions], wide=True)]),
    ]
    return page


def _stats(result: SimResult) -> list[Stat]:
    most = largest(result.points)
    stats = [Stat(f"{p.mode}: a step", f"{p.seconds:.4g} s", nodes_text(p.nodes)) for p in most]
    for p in most:
        if p.recovered_gpu_hours:
            share = p.recovered_gpu_hours / p.idle_gpu_hours
            stats.append(Stat(f"{p.mode}: idle time trained in", f"{share:.0%}", nodes_text(p.nodes)))
    return stats


def _times(result: SimResult) -> list[Part]:
    bars = [
        (phase, [p.phases[phase] for p in result.points], _COLOURS[phase])
        for phase in SIM_PHASES
        if any(p.phases[phase] for p in result.points)
    ]
    chart = _stacked("Mean step by phase", "seconds", result.points, bars)
    return [chart, point_table(result)]


def _speedups(result: SimResult) -> list[Part]:
    if not result.comparisons:
        return []
    modes = list(dict.fromkeys(c.mode for c in result.comparisons))
    parts: list[Part] = []
    for title, of in (("End to end", "e2e"), ("Rollout alone", "rollout")):
        traces: list[Trace] = []
        for mode in modes:
            mine = [c for c in result.comparisons if c.mode == mode]
            x, y = [str(c.nodes) for c in mine], [getattr(c, of) for c in mine]
            traces.append(line(mode, x, y, _OF_MODE[mode]))
        layout = {"xaxis": {"type": "category"}}
        baseline = result.comparisons[0].baseline
        parts.append(Chart(title, traces, "nodes", f"times as fast as {baseline}", layout=layout))
    return parts


def _idle(result: SimResult) -> list[Part]:
    hundred = [100 / len(p.steps) for p in result.points]
    trained = [p.recovered_gpu_hours * f for p, f in zip(result.points, hundred, strict=True)]
    idle = [p.idle_gpu_hours * f for p, f in zip(result.points, hundred, strict=True)]
    waited = [a - b for a, b in zip(idle, trained, strict=True)]
    bars = [("trained in", trained, colours.AMBER), ("waited", waited, colours.GREY)]
    return [_stacked("Idle GPU-hours of 100 steps", "GPU-hours", result.points, bars)]


def _stacked(
    title: str, unit: str, points: Sequence[Point], bars: Sequence[tuple[str, list[float], str]]
) -> Chart:
    """A bar a point, stacked from `bars`: (name, a value for each point, colour)."""
    names = [f"{nodes_text(p.nodes)}, {p.mode}" for p in points]
    traces = [bar(name, x, names, colour, orientation="h") for name, x, colour in bars]
    layout = {"barmode": "stack", "yaxis": {"autorange": "reversed", "type": "category"}}
    return Chart(title, traces, unit, layout=layout, height=140 + 26 * len(names), wide=True)


def _rollout(points: Sequence[Point]) -> list[Part]:
    traces = [
        line(p.mode, [t for t, _ in p.running], [n for _, n in p.running], _OF_MODE[p.mode], mode="lines")
        for p in largest(points)
    ]
    axis = "seconds since the rollout began"
    return [Chart("Running requests", traces, axis, "requests", wide=True)]
