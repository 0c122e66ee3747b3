"""The charts of a run's rollouts: running requests, and lanes of the ranks. Torch-free."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_tlt.observe.events import events_path
from megatron_tlt.observe.page import Chart, Part, Section, Table, Trace
from megatron_tlt.observe.report_charts import line
from megatron_tlt.observe.runfiles import Row, RunData, chosen_steps, step_rows

STATES = {"BUSY": "@busy", "TRAINING": "@training", "IDLE": "@idle"}
_STEPS = 12  # looked at closely
_LANES = 24  # of more ranks the slowest and the quickest are shown
_CURVES = 8
_SEGMENTS = 120  # of a lane
_GRID = 160


@dataclass
class StepView:
    """The events of one step's rollouts: seconds count from the first rank's start."""

    step: int
    states: dict[int, list[tuple[str, float, float]]] = field(default_factory=dict)
    """By rank: (state, start, seconds), by start."""
    curves: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    """By rank: (second, running requests from then on)."""
    drafting: dict[int, tuple[float, float, list[float]]] = field(default_factory=dict)
    """By rank: start, end, and share of each equal part between them in which steps drafted."""

    @property
    def end(self) -> float:
        """When the last rank had answered."""
        ends = [points[-1][0] for points in self.curves.values()]
        return max([*ends, *self.busy_until.values()], default=0.0)

    @property
    def busy_until(self) -> dict[int, float]:
        """By rank: the end of its last answers."""
        ends = {r: [s + d for name, s, d in rows if name == "BUSY"] for r, rows in self.states.items()}
        return {rank: max(values) for rank, values in ends.items() if values}


def step_views(run: RunData) -> list[StepView]:
    """Close looks at some steps of a run, by step. Reads the events of every rank once."""
    wanted = chosen_steps(run, _STEPS)
    rows: dict[int, dict[int, list[Row]]] = {step: {} for step in wanted}
    for rank in run.ranks if wanted else ():
        for step, found in step_rows(events_path(run.run_dir, rank), wanted).items():
            rows[step][rank] = found
    return [_view(step, by_rank) for step, by_rank in rows.items() if by_rank]


def _view(step: int, by_rank: dict[int, list[Row]]) -> StepView:
    view = StepView(step)
    starts = [
        row["ts"]
        for rows in by_rank.values()
        for row in rows
        if row["kind"] == "state" or row["name"] == "rollout"
    ]
    origin = min(starts, default=0.0)
    for rank, rows in by_rank.items():
        states = [(r["name"], r["ts"] - origin, r["dur"]) for r in rows if r["kind"] == "state"]
        if states:
            view.states[rank] = sorted(states, key=lambda s: s[1])
        for row in rows:
            if row["name"] == "curve":
                _take_curve(view, rank, row["attrs"], origin)
    return view


def _take_curve(view: StepView, rank: int, attrs: Row, origin: float) -> None:
    start = attrs["start"] - origin
    view.curves[rank] = [(start + ms / 1e3, running) for ms, running in attrs["running"]]
    if "drafting" in attrs:
        view.drafting[rank] = (start, view.curves[rank][-1][0], attrs["drafting"])


def rollout(run: RunData, views: Sequence[StepView]) -> Section:
    """The running-requests curve and the ranks' lanes."""
    parts: list[Part] = []
    longest = f"{max(views, key=lambda view: view.end).step + 1}" if views else ""
    curves = {f"{view.step + 1}": _curve_traces(view) for view in views if view.curves}
    if curves:
        parts.append(
            Chart(
                "Running requests",
                x="seconds since the step's rollout began",
                y="requests, all ranks",
                note="Shaded: share of the running ranks whose steps draft. The dashed line is where speculation "
                "starts: from there on, most of them do.",
                choices=curves,
                chosen=longest if longest in curves else "",
                layout={
                    "yaxis2": {
                        "range": [0, 1.02],
                        "tickformat": ".0%",
                        "tickvals": [0, 0.5, 1],
                        "title": {"text": ""},
                    }
                },
                wide=True,
                height=340,
                log_switch=True,
            )
        )
    lanes = {f"{view.step + 1}": _lane_traces(view) for view in views if view.states}
    if lanes:
        parts += _lane_charts(run, views, lanes, longest)
    return Section("Rollout", parts)


# The curve


def _grid(view: StepView) -> list[float]:
    end = max((points[-1][0] for points in view.curves.values()), default=0.0)
    return [end * i / (_GRID - 1) for i in range(_GRID)]


def running_at(points: Sequence[tuple[float, int]], at: float) -> int:
    """Requests that a rank runs at a moment."""
    index = bisect_right(points, at, key=lambda point: point[0])
    return points[index - 1][1] if index else 0


def _curve_traces(view: StepView) -> list[Trace]:
    grid = _grid(view)
    total = [sum(running_at(points, at) for points in view.curves.values()) for at in grid]
    traces = [line("all ranks", grid, total, "@3", mode="lines")]
    if 1 < len(view.curves) <= _CURVES:
        colours = ("@1", "@4", "@5", "@6", "@7", "@8", "@2", "@3")
        for colour, (rank, points) in zip(colours, sorted(view.curves.items()), strict=False):
            at, running = zip(*points, strict=True)
            style = {"color": colour, "width": 1.3, "shape": "hv"}
            traces.append(line(f"rank {rank}", at, running, colour, mode="lines") | {"line": style})
    elif len(view.curves) > _CURVES:
        slowest = max(view.curves, key=lambda rank: view.curves[rank][-1][0])
        at, running = zip(*view.curves[slowest], strict=True)
        traces.append(line(f"rank {slowest}, the slowest", at, running, "@6", mode="lines"))
    return traces + _drafting_traces(view, grid, total)


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


def _drafting_traces(view: StepView, grid: Sequence[float], total: Sequence[int]) -> list[Trace]:
    if not view.drafting:
        return []
    shares = drafting_share(view, grid)
    area = line("drafting", grid, shares, "@2/0.5", mode="lines", yaxis="y2", fill="tozeroy")
    area |= {"fillcolor": "@2/0.15", "hovertemplate": "%{y:.0%}"}
    area["line"]["width"] = 1
    begin = speculation_start(grid, shares)
    if begin is None:
        return [area]
    at = grid.index(begin)
    mark = {
        "type": "scatter",
        "mode": "lines",
        "name": f"speculation starts: {begin:.2f} s, {total[at]} running",
        "x": [begin, begin],
        "y": [0, 1],
        "yaxis": "y2",
        "line": {"color": "@2", "width": 2, "dash": "dash"},
        "hoverinfo": "skip",
    }
    return [area, mark]


def speculation_start(grid: Sequence[float], shares: Sequence[float]) -> float | None:
    """The first moment from which steps mostly draft (a share above 1/2 now, and on average until the end)."""
    for index, (at, share) in enumerate(zip(grid, shares, strict=True)):
        rest = shares[index:]
        if share > 0.5 and sum(rest) / len(rest) > 0.5:
            return at
    return None


# Lanes


def lanes_shown(view: StepView) -> list[int]:
    """Ranks whose lanes are shown: all, or of many the slowest and then the quickest."""
    ends = view.busy_until
    ranks = sorted(view.states)
    if len(ranks) <= _LANES:
        return ranks
    ordered = sorted(ranks, key=lambda rank: -ends.get(rank, 0.0))
    return [*ordered[: _LANES * 2 // 3], *ordered[-(_LANES // 3) :]]


def _lane_traces(view: StepView) -> list[Trace]:
    shown = lanes_shown(view)
    traces = []
    for state, colour in STATES.items():
        x, y, base = [], [], []
        for rank in shown:
            for name, start, seconds in joined(view.states[rank], _SEGMENTS):
                if name == state:
                    x.append(seconds)
                    y.append(f"rank {rank}")
                    base.append(start)
        trace: Trace = {"type": "bar", "orientation": "h", "name": state, "x": x, "y": y, "base": base}
        trace |= {"marker": {"color": colour, "line": {"width": 0}}, "customdata": x}
        trace["hovertemplate"] = "%{y}: " + state + " for %{customdata:.3f} s<extra></extra>"
        traces.append(trace)
    return traces


def joined(states: Sequence[tuple[str, float, float]], most: int) -> list[tuple[str, float, float]]:
    """States with neighbours of one kind made one, and, where still more than `most`, the shortest swallowed."""
    rows = list(states)
    while True:
        merged: list[tuple[str, float, float]] = []
        for name, start, seconds in rows:
            if merged and merged[-1][0] == name:
                merged[-1] = (name, merged[-1][1], start + seconds - merged[-1][1])
            else:
                merged.append((name, start, seconds))
        if len(merged) <= most:
            return merged
        limit = sorted(seconds for _, _, seconds in merged)[len(merged) // 2]
        rows = [merged[0]]
        for name, start, seconds in merged[1:]:
            rows.append((rows[-1][0] if seconds <= limit else name, start, seconds))


def _lane_charts(
    run: RunData, views: Sequence[StepView], lanes: dict[str, list[Trace]], shown: str
) -> list[Part]:
    most = max(len(lanes_shown(view)) for view in views)
    many = any(len(view.states) > _LANES for view in views)
    layout = {
        "barmode": "overlay",
        "bargap": 0.25,
        "hovermode": "closest",
        "yaxis": {"autorange": "reversed", "type": "category", "title": {"text": ""}},
    }
    note = "BUSY: answers. IDLE: no request left here, elsewhere there is. TRAINING: idle, and training the drafter."
    title = "What each rank did" if not many else f"The slowest and the quickest of {len(run.ranks)} ranks"
    chart = Chart(
        title,
        x="seconds since the step's rollout began",
        note=note,
        choices=lanes,
        chosen=shown,
        layout=layout,
        wide=True,
        height=110 + 26 * most,
    )
    if not many:
        return [chart]
    shares = {f"{view.step + 1}": _share_traces(view) for view in views if view.states}
    above = Chart(
        f"What {len(run.ranks)} ranks did",
        x="seconds since the step's rollout began",
        y="ranks",
        choices=shares,
        chosen=shown,
        wide=True,
    )
    return [above, chart, _slowest(views)]


def _share_traces(view: StepView) -> list[Trace]:
    """How many ranks are in each state, over time."""
    end = max(start + seconds for rows in view.states.values() for _, start, seconds in rows)
    grid = [end * i / (_GRID - 1) for i in range(_GRID)]
    counts = {state: [0] * _GRID for state in STATES}
    for rows in view.states.values():
        starts = [start for _, start, _ in rows]
        for i, at in enumerate(grid):
            index = bisect_right(starts, at) - 1
            if index >= 0 and at <= rows[index][1] + rows[index][2]:
                counts[rows[index][0]][i] += 1
    return [
        line(state, grid, counts[state], colour, mode="lines", stackgroup="one", fillcolor=colour)
        for state, colour in STATES.items()
    ]


def _slowest(views: Sequence[StepView]) -> Table:
    """Ranks that were among the last ones in the steps looked at."""
    often: Counter[int] = Counter()
    behind: Counter[int] = Counter()
    for view in views:
        ends = view.busy_until
        if not ends:
            continue
        median = sorted(ends.values())[len(ends) // 2]
        for rank in sorted(ends, key=lambda r: -ends[r])[: max(1, len(ends) // 50)]:
            often[rank] += 1
            behind[rank] += round(1e3 * (ends[rank] - median))
    rows = [(f"rank {rank}", times, behind[rank] / times / 1e3) for rank, times in often.most_common(8)]
    note = f"Of the {len(views)} steps that are looked at closely. Often the same rank: look at its machine."
    return Table(
        ["among the last 2 %", "steps", "seconds behind the median"], rows, "Worst ranks", note, wide=True
    )
