"""The charts of a run's rollouts: running requests, and what each rank did. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_tlt.observe.page import Chart, Part, Section, Trace, bar, line
from megatron_tlt.observe.report_speculation import PERCENT
from megatron_tlt.observe.runfiles import Row, RunData, chosen_steps

STATES = {"BUSY": "@busy", "TRAINING": "@training", "IDLE": "@idle"}
_STEPS = 12  # steps to choose from
_SLOWEST, _QUICKEST = 16, 8  # ranks with a bar of their own, where there are more than both
_GRID = 160  # moments at which the ranks' curves are added up
_SINCE = "seconds since the step's rollout began"


@dataclass
class StepView:
    """The events of one step's rollouts. Seconds count from the first rank's start."""

    step: int
    states: dict[int, list[tuple[str, float, float]]] = field(default_factory=dict)
    """By rank: (state, start, seconds), by start."""
    curves: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    """By rank: (second, running requests from then on)."""
    drafting: dict[int, tuple[float, float, list[float]]] = field(default_factory=dict)
    """By rank: start, end, and for each of equal parts between them the share of its time in which steps drafted."""

    def busy_until(self, rank: int) -> float:
        """The end of a rank's last response."""
        ends = (start + seconds for name, start, seconds in self.states[rank] if name == "BUSY")
        return max(ends, default=0.0)


def step_views(run: RunData) -> list[StepView]:
    """Detailed views of some steps of a run, by step. Reads the events of every rank once."""
    wanted = chosen_steps(run, _STEPS)
    by_step: dict[int, dict[int, list[Row]]] = {step: {} for step in wanted}
    for rank in run.ranks if wanted else ():
        for step, rows in run.events_of_steps(rank, wanted).items():
            by_step[step][rank] = rows
    return [_view(step, by_rank) for step, by_rank in by_step.items() if by_rank]


def _view(step: int, by_rank: dict[int, list[Row]]) -> StepView:
    view = StepView(step)
    every = [row for rows in by_rank.values() for row in rows]
    origin = min((r["ts"] for r in every if r["kind"] == "state" or r["name"] == "rollout"), default=0.0)
    for rank, rows in by_rank.items():
        states = [(r["name"], r["ts"] - origin, r["dur"]) for r in rows if r["name"] in STATES]
        if states:
            view.states[rank] = sorted(states, key=lambda state: state[1])
        for attrs in (row["attrs"] for row in rows if row["name"] == "curve"):
            start = attrs["start"] - origin
            view.curves[rank] = [(start + ms / 1e3, running) for ms, running in attrs["running"]]
            if "drafting" in attrs:
                view.drafting[rank] = (start, view.curves[rank][-1][0], attrs["drafting"])
    return view


def rollout(run: RunData, views: Sequence[StepView]) -> Section:
    """Running requests over time, and the states of the ranks; of a step to choose, the longest first."""
    ends = {f"{v.step + 1}": max(map(v.busy_until, v.states), default=0.0) for v in views}
    chosen = max(ends, key=lambda step: ends[step], default="")
    parts: list[Part] = []
    curves = {f"{view.step + 1}": _curve_traces(view) for view in views if view.curves}
    if curves:
        note = (
            "Shaded: share of the running ranks whose steps draft. The dashed line is where speculation starts: from "
            "there on, most of them do."
        )
        axis = PERCENT | {"range": [0, 1.02], "tickvals": [0, 0.5, 1], "title": {"text": ""}}
        title, unit, layout = "Running requests", "requests, all ranks", {"yaxis2": axis}
        chart = Chart(
            title, (), _SINCE, unit, note, curves, chosen, layout=layout, wide=True, log_switch=True
        )
        parts.append(chart)
    views = [view for view in views if view.states]
    return Section("Rollout", parts + (_state_charts(len(run.ranks), views, chosen) if views else []))


def running_at(points: Sequence[tuple[float, int]], moments: np.ndarray) -> np.ndarray:
    """Requests that a rank runs at each moment; 0 before its first."""
    times, running = zip(*points, strict=True)
    found: np.ndarray = np.array([0, *running])[np.searchsorted(times, moments, side="right")]
    return found


def _curve_traces(view: StepView) -> list[Trace]:
    grid = np.linspace(0, max(points[-1][0] for points in view.curves.values()), _GRID)
    total = np.sum([running_at(points, grid) for points in view.curves.values()], axis=0)
    traces = [line("all ranks", grid, total, "@3", mode="lines")]
    if not view.drafting:
        return traces
    shares = drafting_share(view, grid)
    style = {"mode": "lines", "yaxis": "y2", "fill": "tozeroy", "fillcolor": "@2/0.15"}
    traces.append(line("drafting", grid, shares, "@2", **style, hovertemplate="%{y:.0%}"))
    rests = np.cumsum(shares[::-1])[::-1] / np.arange(_GRID, 0, -1)  # means until the end
    drafts = np.flatnonzero((shares > 0.5) & (rests > 0.5))
    if len(drafts):
        start = drafts[0]
        name = f"speculation starts: {grid[start]:.2f} s, {total[start]} running"
        at = [grid[start]] * 2
        traces.append(line(name, at, [0, 1], "@2", "dash", mode="lines", yaxis="y2", hoverinfo="skip"))
    return traces


def drafting_share(view: StepView, grid: np.ndarray) -> np.ndarray:
    """At each moment, the mean over the ranks that still run of the share of their steps that draft."""
    total, running = np.zeros(len(grid)), np.zeros(len(grid))
    for start, end, parts in view.drafting.values():
        part = ((grid - start) / max(1e-9, end - start) * len(parts)).astype(int)
        runs = (start <= grid) & (grid <= end)
        total += np.where(runs, np.array(parts)[np.clip(part, 0, len(parts) - 1)], 0.0)
        running += runs
    return total / np.maximum(1, running)


def ranks_shown(view: StepView) -> list[int]:
    """Ranks that have a bar: all, or of many the slowest and then the quickest."""
    if len(view.states) <= _SLOWEST + _QUICKEST:
        return sorted(view.states)
    ordered = sorted(view.states, key=lambda rank: (-view.busy_until(rank), rank))
    return [*ordered[:_SLOWEST], *ordered[-_QUICKEST:]]


def _state_charts(num_ranks: int, views: Sequence[StepView], chosen: str) -> list[Part]:
    bars = {f"{view.step + 1}": _state_bars(view) for view in views}
    most = max(len(ranks_shown(view)) for view in views)
    has_all = all(len(view.states) == len(ranks_shown(view)) for view in views)
    title = "What each rank did" if has_all else f"The slowest and the quickest of {num_ranks} ranks"
    note = (
        "BUSY: has requests. IDLE: has none left, other ranks have. TRAINING: idle, and trains the drafter."
    )
    axis = {"autorange": "reversed", "type": "category", "title": {"text": ""}}
    layout = {"barmode": "overlay", "bargap": 0.25, "hovermode": "closest", "yaxis": axis}
    by_rank = Chart(
        title, (), _SINCE, "", note, bars, chosen, layout=layout, height=110 + 26 * most, wide=True
    )
    if has_all:
        return [by_rank]
    counts = {f"{view.step + 1}": _count_traces(view) for view in views}
    title = f"What {num_ranks} ranks did"
    return [Chart(title, (), _SINCE, "ranks", choices=counts, chosen=chosen, wide=True), by_rank]


def _state_bars(view: StepView) -> list[Trace]:
    """For each state, a bar of each stretch of time that a rank was in it."""
    stretches = [(f"rank {rank}", *row) for rank in ranks_shown(view) for row in view.states[rank]]
    traces = []
    for state, colour in STATES.items():
        found = [(rank, start, seconds) for rank, name, start, seconds in stretches if name == state]
        seconds = [row[2] for row in found]
        hover = "%{y}: " + state + " for %{customdata:.3f} s<extra></extra>"
        trace = bar(state, seconds, [row[0] for row in found], colour, orientation="h", hovertemplate=hover)
        traces.append(trace | {"base": [row[1] for row in found], "customdata": seconds})
        trace["marker"]["line"] = {"width": 0}
    return traces


def _count_traces(view: StepView) -> list[Trace]:
    """How many ranks are in each state, over time."""
    rows = [row for of_rank in view.states.values() for row in of_rank]
    grid = np.linspace(0, max(start + seconds for _, start, seconds in rows), _GRID)
    traces = []
    for state, colour in STATES.items():
        spans = np.array([(start, start + seconds) for name, start, seconds in rows if name == state])
        begins, ends = spans.reshape(-1, 2).T
        counts = np.searchsorted(np.sort(begins), grid, "right") - np.searchsorted(np.sort(ends), grid)
        traces.append(line(state, grid, counts, colour, mode="lines", stackgroup="one", fillcolor=colour))
    return traces
