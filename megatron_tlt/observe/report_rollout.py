"""The charts of a run's rollouts: running requests, and the state of each rank. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_tlt.observe import colours
from megatron_tlt.observe.page import Chart, PageSection, Trace, bar, line
from megatron_tlt.observe.runfiles import JsonRow, RunData, chosen_steps

STATES = {
    "BUSY": colours.BLUE,
    "WAITING": colours.PURPLE,
    "PRE_ROLLING": colours.GREEN,
    "TRAINING": colours.AMBER,
    "IDLE": colours.GREY,
}
_STEPS = 12  # steps to choose from
_GRID = 160  # moments at which the ranks' curves are added up
_LANE, _LANES = 26, 700  # pixels of one rank's lane, and of all lanes at most
_SINCE = "seconds since the start of the step's rollout"


@dataclass
class StepView:
    """The events of one step's rollouts. Seconds count from the first rank's start."""

    step: int
    states: dict[int, list[tuple[str, float, float]]] = field(default_factory=dict)
    """By rank: (state, start, seconds)."""
    curves: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    """By rank: (second, running requests from then on)."""
    drafting: dict[int, tuple[float, float, list[float]]] = field(default_factory=dict)
    """By rank: start, end, and for each of equal parts between them the share of its time in which steps drafted."""

    @property
    def seconds(self) -> float:
        """The end of the last response."""
        rows = [row for of_rank in self.states.values() for row in of_rank]
        return max((start + seconds for name, start, seconds in rows if name == "BUSY"), default=0.0)


def step_views(run: RunData) -> list[StepView]:
    """Detailed views of some steps of a run, by step. Reads the events of every rank once."""
    wanted = chosen_steps(run, _STEPS)
    by_step: dict[int, dict[int, list[JsonRow]]] = {step: {} for step in wanted}
    for rank in run.ranks if wanted else ():
        for step, rows in run.events_of_steps(rank, wanted).items():
            by_step[step][rank] = rows
    return [_view(step, by_rank) for step, by_rank in by_step.items() if by_rank]


def _view(step: int, by_rank: Mapping[int, Sequence[JsonRow]]) -> StepView:
    view = StepView(step)
    every = [row for rows in by_rank.values() for row in rows]
    origin = min((r["ts"] for r in every if r["kind"] == "state" or r["name"] == "rollout"), default=0.0)
    for rank, rows in by_rank.items():
        states = [(r["name"], r["ts"] - origin, r["dur"]) for r in rows if r["name"] in STATES]
        if states:
            view.states[rank] = states
        for attrs in (row["attrs"] for row in rows if row["name"] == "curve"):
            start = attrs["start"] - origin
            view.curves[rank] = [(start + ms / 1e3, running) for ms, running in attrs["running"]]
            if "drafting" in attrs:
                view.drafting[rank] = (start, view.curves[rank][-1][0], attrs["drafting"])
    return view


def rollout(run: RunData) -> PageSection:
    """Running requests over time, and the states of the ranks; of a step to choose, the longest first."""
    views = step_views(run)
    longest = max(views, key=lambda view: view.seconds, default=None)
    chosen = _name(longest) if longest is not None else ""
    parts = []
    note = (
        "Shaded: share of the running ranks whose steps draft. Speculation starts (dashed) where most steps draft, "
        "then and on average until the end."
    )
    axis: dict[str, Any] = {"tickformat": ".0%", "range": [0, 1.02], "tickvals": [0, 0.5, 1]}
    layout: dict[str, Any] = {"yaxis2": axis}
    curves = {_name(view): _curve_traces(view) for view in views if view.curves}
    if curves:
        title, unit = "Running requests", "requests, all ranks"
        parts.append(
            Chart(title, (), _SINCE, unit, note, curves, chosen, layout=layout, wide=True, log_switch=True)
        )
    note = (
        "BUSY: the rank has requests. WAITING: all of them wait for their environments. IDLE: it has none left, other "
        "ranks have. PRE_ROLLING: idle, decodes the next two steps' prompts. TRAINING: idle, trains the drafter."
    )
    bars = {_name(view): _state_bars(view) for view in views if view.states}
    if bars:
        ticks: dict[str, Any] = {"dtick": 1} if len(run.ranks) <= _LANES // _LANE else {}
        axis = {"autorange": "reversed", "rangemode": "normal", "showgrid": False, **ticks}
        layout = {"barmode": "overlay", "bargap": 0.2, "hovermode": "closest", "yaxis": axis}
        height = 130 + min(_LANES, _LANE * len(run.ranks))
        title = "State of each rank"
        parts.append(
            Chart(title, (), _SINCE, "rank", note, bars, chosen, layout=layout, height=height, wide=True)
        )
    return PageSection("Rollout", parts)


def _name(view: StepView) -> str:
    return f"step {view.step + 1}"


def running_at(points: Sequence[tuple[float, int]], moments: np.ndarray) -> np.ndarray:
    """Requests that a rank runs at each moment; 0 before its first."""
    times, running = zip(*points, strict=True)
    found: np.ndarray = np.array([0, *running])[np.searchsorted(times, moments, side="right")]
    return found


def _curve_traces(view: StepView) -> list[Trace]:
    grid = np.linspace(0, max(points[-1][0] for points in view.curves.values()), _GRID)
    total = np.sum([running_at(points, grid) for points in view.curves.values()], axis=0)
    traces = [line("all ranks", grid, total, colours.BLUE, mode="lines")]
    if not view.drafting:
        return traces
    shares = drafting_share(view, grid)
    style: dict[str, Any] = {"mode": "lines", "yaxis": "y2"}
    fill = {"fill": "tozeroy", "fillcolor": "rgba(209, 112, 42, 0.15)", "hovertemplate": "%{y:.0%}"}
    traces.append(line("drafting", grid, shares, colours.ORANGE, **style, **fill))
    rests = np.cumsum(shares[::-1])[::-1] / np.arange(_GRID, 0, -1)  # means until the end
    drafts = np.flatnonzero((shares > 0.5) & (rests > 0.5))
    if len(drafts):
        start = drafts[0]
        name = f"speculation starts: {grid[start]:.2f} s, {total[start]} running"
        dashed = {"color": colours.ORANGE, "dash": "dash"}
        traces.append(line(name, [grid[start]] * 2, [0, 1], "", **style, line=dashed, hoverinfo="skip"))
    return traces


def drafting_share(view: StepView, grid: np.ndarray) -> np.ndarray:
    """At each moment, the mean over the ranks that still run of the share of their steps that draft."""
    total = np.zeros(len(grid))
    running = np.zeros(len(grid))
    for start, end, parts in view.drafting.values():
        part = ((grid - start) / max(1e-9, end - start) * len(parts)).astype(int)
        runs = (start <= grid) & (grid <= end)
        total += np.where(runs, np.array(parts)[np.clip(part, 0, len(parts) - 1)], 0.0)
        running += runs
    return total / np.maximum(1, running)


def _state_bars(view: StepView) -> list[Trace]:
    """For each state, a bar of each stretch of time that a rank was in it."""
    stretches = [(rank, *row) for rank, rows in view.states.items() for row in rows]
    traces = []
    for state, colour in STATES.items():
        found = [(rank, start, seconds) for rank, name, start, seconds in stretches if name == state]
        seconds = [row[2] for row in found]
        hover = f"rank %{{y}}: {state} for %{{customdata:.3f}} s<extra></extra>"
        trace = bar(state, seconds, [row[0] for row in found], colour, orientation="h", hovertemplate=hover)
        trace["marker"]["line"] = {"width": 0}
        traces.append(trace | {"base": [row[1] for row in found], "customdata": seconds})
    return traces
