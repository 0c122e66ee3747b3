"""A simulation as one self-contained HTML page, of the same building blocks as a run's report. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_tlt.observe import colours
from megatron_tlt.observe.files import write_atomically
from megatron_tlt.observe.page import Chart, Page, PageSection, Part, Table, bar, line
from megatron_tlt.observe.summary import Stat
from megatron_tlt.sim.result import MODES, SIM_PHASES, Point, SimResult
from megatron_tlt.sim.tables import HUNDRED_STEPS, headline, largest, nodes_text, point_table

_COLOURS = (colours.BLUE, colours.GREY, colours.OLIVE, colours.PURPLE, colours.GREEN, colours.BROWN)  # of phases
_HUES = (colours.BLUE, colours.ORANGE, colours.PURPLE, colours.GREEN, colours.AMBER, colours.RED)
_OF_MODE = dict(zip(MODES, _HUES, strict=True))  # the same in every chart
Bar = tuple[str, list[float], str]  # name, a value for each point, colour


def write_report(result: SimResult, path: Path) -> None:
    """Writes the page, making its directory."""
    write_atomically(path, [build_page(result).html()])


def build_page(result: SimResult) -> Page:
    """The page, its headline first."""
    page = Page(result.name, "simulated, not measured: the assumptions are at the end")
    page.headline = headline(result)
    page.stats = [Stat(f"{p.mode}: a step", f"{p.seconds:.4g} s", nodes_text(p.nodes)) for p in largest(result.points)]
    points = result.points
    phases = [
        (phase, [p.mean.phases[phase] for p in points], colour)
        for phase, colour in zip(SIM_PHASES, _COLOURS, strict=True)
        if any(p.mean.phases[phase] for p in points)
    ]
    times = _stacked("Mean step by phase", "seconds", points, phases)
    idle = _stacked("Idle GPU-hours of 100 steps", "GPU-hours", points, _idle(points))
    page.sections = [
        PageSection("Step time", [times, point_table(result)]),
        PageSection("Speed-up", _speedups(result)),
        PageSection("Idle time", [idle]),
        PageSection("Assumptions", [Table(["assumed"], [[text] for text in result.assumptions], wide=True)]),
    ]
    return page


def _speedups(result: SimResult) -> list[Part]:
    if not result.comparisons:
        return []
    by_mode = {c.mode: [d for d in result.comparisons if d.mode == c.mode] for c in result.comparisons}
    unit, layout = f"times as fast as {result.comparisons[0].baseline}", {"xaxis": {"type": "category"}}
    parts: list[Part] = []
    for title, of in (("End to end", "e2e"), ("Rollout alone", "rollout")):
        traces = [
            line(mode, [str(c.nodes) for c in mine], [getattr(c, of) for c in mine], _OF_MODE[mode])
            for mode, mine in by_mode.items()
        ]
        parts.append(Chart(title, traces, "nodes", unit, layout=layout))
    return parts


def _idle(points: Sequence[Point]) -> list[Bar]:
    trained = [HUNDRED_STEPS * p.mean.recovered_gpu_seconds for p in points]
    decoded = [HUNDRED_STEPS * p.mean.pre_rolling_gpu_seconds for p in points]
    waited = [HUNDRED_STEPS * p.mean.idle_gpu_seconds - a - b for p, a, b in zip(points, trained, decoded, strict=True)]
    bars = [("trained in", trained, colours.AMBER), ("pre-rolled in", decoded, colours.BLUE)]
    return [*bars, ("waited", waited, colours.GREY)]


def _stacked(title: str, unit: str, points: Sequence[Point], bars: Sequence[Bar]) -> Chart:
    """A bar a point, stacked from `bars`."""
    names = [f"{nodes_text(p.nodes)}, {p.mode}" for p in points]
    traces = [bar(name, x, names, colour, orientation="h") for name, x, colour in bars]
    layout = {"barmode": "stack", "yaxis": {"autorange": "reversed", "type": "category"}}
    return Chart(title, traces, unit, layout=layout, height=140 + 26 * len(names), wide=True)
