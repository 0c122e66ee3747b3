"""The six charts of a run: learning, acceptance, time, running requests, states of ranks, lengths. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_tlt.observe import colours
from megatron_tlt.observe.page import Chart, Trace, bar, line
from megatron_tlt.observe.runfiles import JsonRow, RunData

# Phases in the order of a step, each with its colour; others are red.
PHASE_COLOURS = {
    "reset": colours.ORANGE,
    "rollout": colours.BLUE,
    "idle": colours.GREY,
    "score": colours.OLIVE,
    "exchange": colours.CYAN,
    "logprobs": colours.PURPLE,
    "update": colours.GREEN,
    "merge": colours.AMBER,
    "weight_sync": colours.BROWN,
}
STATES = {
    "BUSY": colours.BLUE,
    "WAITING": colours.PURPLE,
    "PRE_ROLLING": colours.GREEN,
    "TRAINING": colours.AMBER,
    "IDLE": colours.GREY,
}
_GRID = 160  # moments at which the ranks' curves are added up
_LANE, _LANES = 26, 700  # pixels of one rank's lane, and of all lanes at most


def charts_of(run: RunData) -> list[Chart]:
    """The charts that the run has data for."""
    return [*_learning(run), *_acceptance(run), *_time(run), *_rollouts(run), *_lengths(run)]


def _lines(run: RunData, metrics: Mapping[str, str], first: int = 0, **more: Any) -> list[Trace]:
    """A line by step of each metric (name to label) that the run has, in the colours from `first` on."""
    pairs = zip(metrics.items(), colours.CYCLE[first:], strict=False)
    return [line(label, *run.column(name), colour, **more) for (name, label), colour in pairs if run.column(name)[0]]


def _learning(run: RunData) -> Iterator[Chart]:
    traces = _lines(run, {"reward/mean": "reward", "reward/accuracy": "accuracy"})
    if run.evals:
        errors = {"error_y": {"type": "data", "array": run.column("eval/stderr", run.evals)[1]}}
        traces.append(line("held out", *run.column("eval/pass@1", run.evals), colours.BLUE, **errors))
    unit, note, label, axis = "nats a token", "", "teacher KL", {}
    if traces:
        note = "Reward and accuracy of the rollouts, pass@1 of the same held-out prompts with its standard error. "
        unit, label, axis = "mean over responses", "teacher KL (right)", {"yaxis": "y2"}
    if teacher := _lines(run, {"policy/teacher_kl": label}, 3, **axis):
        note += "Teacher KL: log policy − log teacher, in nats a token."
    if traces or teacher:
        yield Chart("Learning", [*traces, *teacher], "step", unit, note.rstrip())


def _acceptance(run: RunData) -> Iterator[Chart]:
    traces = _lines(run, {"spec/accept_length": "accepted length"})
    traces += _lines(run, {"drafter/accept/1_mean": "1 − TV (right)"}, 1, yaxis="y2")
    if traces:
        note = (
            "Tokens that a request gains in a step in which it has a draft, the policy's own included: 1 is no gain. "
            "1 − TV (total variation distance) between drafter and policy at the first drafted token, on the responses "
            "of training."
        )
        layout: dict[str, Any] = {"yaxis2": {"range": [0, 1.02]}}
        yield Chart("Acceptance of drafts", traces, "step", "tokens", note, layout=layout)


def phases_of(run: RunData) -> dict[str, list[float]]:
    """Seconds of each phase in each step (0 where it did not run), means over the ranks, in the order of a step."""
    names = run.phases
    ordered = [name for name in PHASE_COLOURS if name in names] + sorted(names - PHASE_COLOURS.keys())
    return {name: [row.get(f"time/{name}") or 0.0 for row in run.steps] for name in ordered}


def _time(run: RunData) -> Iterator[Chart]:
    steps = [row["step"] for row in run.steps]
    bars = [bar(name, steps, s, PHASE_COLOURS.get(name, colours.RED)) for name, s in phases_of(run).items()]
    if bars:
        note = "Idle: the rank has no request left, while other ranks still generate."
        title, unit, layout = "Step time by phase", "seconds, mean of the ranks", {"barmode": "stack"}
        yield Chart(title, bars, "step", unit, note, layout=layout, wide=True, height=340)


def _lengths(run: RunData) -> Iterator[Chart]:
    names = {"length/median": "median", "length/mean": "mean", "length/p95": "95 %", "length/max": "longest"}
    if traces := _lines(run, names):
        traces += _lines(run, {"length/truncated": "truncated (right)"}, len(names), yaxis="y2")
        note = "The longest responses decide how long a rollout takes. Truncated: the share that a limit has cut off."
        layout: dict[str, Any] = {"yaxis2": {"tickformat": ".0%", "range": [0, 1.02]}}
        yield Chart("Response length", traces, "step", "tokens", note, layout=layout, wide=True)


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


def longest_rollout(run: RunData) -> StepView | None:
    """The view of the step with the longest rollout; None before the first step. Reads the events of every rank."""
    if not run.steps:
        return None
    longest = max(run.steps, key=lambda row: (row.get("time/rollout") or 0) + (row.get("time/idle") or 0))
    step = longest["step"] - 1
    return _view(step, {rank: run.events_of_steps(rank, [step]).get(step, []) for rank in run.ranks})


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


def _rollouts(run: RunData) -> Iterator[Chart]:
    """Running requests over time, and the states of the ranks, of the step with the longest rollout."""
    view = longest_rollout(run)
    if view is None:
        return
    x, wide = f"seconds since the start of the rollout of step {view.step + 1}, the longest", True
    if view.curves:
        note = "Shaded: share of the running ranks whose steps draft."
        layout: dict[str, Any] = {"yaxis2": {"tickformat": ".0%", "range": [0, 1.02], "tickvals": [0, 0.5, 1]}}
        traces = _curve_traces(view)
        yield Chart("Running requests", traces, x, "requests, all ranks", note, layout=layout, wide=wide)
    if view.states:
        note = (
            "BUSY: the rank has requests. WAITING: all of them wait for their environments. IDLE: it has none left, "
            "other ranks have. PRE_ROLLING: idle, decodes the next two steps' prompts. TRAINING: trains the drafter."
        )
        ticks: dict[str, Any] = {"dtick": 1} if len(run.ranks) <= _LANES // _LANE else {}
        axis = {"autorange": "reversed", "rangemode": "normal", "showgrid": False, **ticks}
        layout = {"barmode": "overlay", "bargap": 0.2, "hovermode": "closest", "yaxis": axis}
        height = 130 + min(_LANES, _LANE * len(run.ranks))
        title, bars = "State of each rank", _state_bars(view)
        yield Chart(title, bars, x, "rank", note, layout=layout, height=height, wide=wide)


def _at(points: Sequence[tuple[float, int]], moments: np.ndarray) -> np.ndarray:
    """Requests that a rank runs at each moment; 0 before its first."""
    times, running = zip(*points, strict=True)
    found: np.ndarray = np.array([0, *running])[np.searchsorted(times, moments, side="right")]
    return found


def _curve_traces(view: StepView) -> list[Trace]:
    grid = np.linspace(0, max(points[-1][0] for points in view.curves.values()), _GRID)
    total = np.sum([_at(points, grid) for points in view.curves.values()], axis=0)
    traces = [line("all ranks", grid, total, colours.BLUE, mode="lines")]
    if view.drafting:
        fill = {"fill": "tozeroy", "fillcolor": "rgba(209, 112, 42, 0.15)", "hovertemplate": "%{y:.0%}"}
        shares = _drafting_share(view, grid)
        traces.append(line("drafting", grid, shares, colours.ORANGE, mode="lines", yaxis="y2", **fill))
    return traces


def _drafting_share(view: StepView, grid: np.ndarray) -> np.ndarray:
    """At each moment, the mean over the ranks that still run of the share of their steps that draft."""
    total, running = np.zeros(len(grid)), np.zeros(len(grid))
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
