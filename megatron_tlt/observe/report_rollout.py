"""The charts of a run's rollouts: running requests, and what each rank did. Torch-free."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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

    @property
    def busy_until(self) -> dict[int, float]:
        """By rank: the end of its last answer."""
        ends = {r: [s + d for name, s, d in rows if name == "BUSY"] for r, rows in self.states.items()}
        return {rank: max(values) for rank, values in ends.items() if values}


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
    longest = max(views, key=lambda view: max(view.busy_until.values(), default=0.0), default=None)
    chosen = f"{longest.step + 1}" if longest is not None else ""
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


def running_at(points: Sequence[tuple[float, int]], at: float) -> int:
    """Requests that a rank runs at a moment."""
    index = bisect_right(points, at, key=lambda point: point[0])
    return points[index - 1][1] if index else 0


def _curve_traces(view: StepView) -> list[Trace]:
    grid = _grid(max(points[-1][0] for points in view.curves.values()))
    total = [sum(running_at(points, at) for points in view.curves.values()) for at in grid]
    traces = [line("all ranks", grid, total, "@3", mode="lines")]
    if not view.drafting:
        return traces
    shares = drafting_share(view, grid)
    style: dict[str, Any] = {"mode": "lines", "yaxis": "y2", "fill": "tozeroy", "fillcolor": "@2/0.15"}
    traces.append(line("drafting", grid, shares, "@2", **style, hovertemplate="%{y:.0%}"))
    start = speculation_start(shares)
    if start is not None:
        name = f"speculation starts: {grid[start]:.2f} s, {total[start]} running"
        at = [grid[start]] * 2
        traces.append(line(name, at, [0, 1], "@2", "dash", mode="lines", yaxis="y2", hoverinfo="skip"))
    return traces


def _grid(end: float) -> list[float]:
    return [end * i / (_GRID - 1) for i in range(_GRID)]


def drafting_share(view: StepView, grid: Sequence[float]) -> list[float]:
    """At each moment, the mean over the ranks that still run of the share of their steps that draft."""
    shares = []
    for at in grid:
        running = [
            parts[min(len(parts) - 1, int((at - start) / max(1e-9, end - start) * len(parts)))]
            for start, end, parts in view.drafting.values()
            if start <= at <= end
        ]
        shares.append(sum(running) / len(running) if running else 0.0)
    return shares


def speculation_start(shares: Sequence[float]) -> int | None:
    """Index of the first moment from which most steps draft: a share above 1/2, then and on average until the end."""
    for index, share in enumerate(shares):
        rest = shares[index:]
        if share > 0.5 and sum(rest) / len(rest) > 0.5:
            return index
    return None


def ranks_shown(view: StepView) -> list[int]:
    """Ranks that have a bar: all, or of many the slowest and then the quickest."""
    ends = view.busy_until
    if len(view.states) <= _SLOWEST + _QUICKEST:
        return sorted(view.states)
    ordered = sorted(view.states, key=lambda rank: (-ends.get(rank, 0.0), rank))
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
    grid = _grid(max(start + seconds for rows in view.states.values() for _, start, seconds in rows))
    counts = {state: [0] * _GRID for state in STATES}
    for rows in view.states.values():
        starts = [start for _, start, _ in rows]
        for i, at in enumerate(grid):
            index = bisect_right(starts, at) - 1
            if index >= 0 and at <= rows[index][1] + rows[index][2]:
                counts[rows[index][0]][i] += 1
    style = {"mode": "lines", "stackgroup": "one"}
    return [line(s, grid, counts[s], colour, **style, fillcolor=colour) for s, colour in STATES.items()]
