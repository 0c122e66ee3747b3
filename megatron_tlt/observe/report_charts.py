"""The charts that need the rows by step only: learning, time, lengths, idle time, drafter. Torch-free.

Most take one run or two, to compare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_tlt.observe.page import Chart, Part, Section, bar, line
from megatron_tlt.observe.runfiles import Row, RunData

# Phases in the order of a step, each with its colour; others share the last one.
PHASES = {
    "rollout": "@3",
    "idle": "@idle",
    "score": "@5",
    "exchange": "@7",
    "logprobs": "@4",
    "update": "@1",
    "merge": "@training",
    "weight_sync": "@8",
    "log": "@6",
    "checkpoint": "@6",
}
_STRAGGLERS = (
    "The rank that waits least holds the others up: it had the longest responses or did work of others, or its machine "
    "is slow."
)


def labelled(runs: Sequence[RunData]) -> list[tuple[RunData, str, str]]:
    """(run, end of its labels, dash of its lines): of two runs, A has solid lines and B dotted ones."""
    if len(runs) == 1:
        return [(runs[0], "", "solid")]
    return [(runs[0], ", A", "solid"), (runs[1], ", B", "dot")]


def metric_chart(
    runs: Sequence[RunData],
    title: str,
    unit: str,
    metrics: Sequence[tuple[str, str, str]],
    note: str = "",
    **more: Any,
) -> list[Part]:
    """A chart by step of metrics (name, label, colour) of one or two runs; nothing if they have none of them."""
    lines = [
        line(label + end, *run.column(name), colour, dash)
        for name, label, colour in metrics
        for run, end, dash in labelled(runs)
        if run.column(name)[0]
    ]
    return [Chart(title, lines, "step", unit, note, **more)] if lines else []


def stacked_chart(
    title: str, unit: str, steps: Sequence[int], bars: Mapping[tuple[str, str], Sequence[float]], **more: Any
) -> Chart:
    """Bars by step on top of each other, by (label, colour)."""
    traces = [bar(label, steps, values, colour) for (label, colour), values in bars.items()]
    layout = {"barmode": "stack", "bargap": 0.15, "legend": {"traceorder": "normal"}} | more.pop("layout", {})
    return Chart(title, traces, "step", unit, layout=layout, **more)


def learning(runs: Sequence[RunData]) -> Section:
    """Reward and accuracy, by step and held out."""
    metrics = (("reward/mean", "reward", "@1"), ("reward/accuracy", "accuracy", "@3"))
    parts = metric_chart(runs, "Reward and accuracy of the rollouts", "mean over responses", metrics)
    names = {name for run in runs for row in run.evals for name in row if name.startswith("eval/pass@")}
    traces = []
    for at, name in enumerate(sorted(names, key=lambda name: (len(name), name))):
        for run, end, dash in labelled(runs):
            points = run.column(name, run.evals)
            traces.append(line(name.removeprefix("eval/") + end, *points, f"@{at % 8 + 1}", dash))
            if name == "eval/pass@1":
                errors = run.column("eval/stderr", run.evals)[1]
                traces[-1]["error_y"] = {"type": "data", "array": errors, "thickness": 1.2, "width": 4}
    if traces:
        note = "Bars: one standard error. The same held-out prompts every time."
        parts.append(Chart("Held-out accuracy", traces, "steps done", "share of prompts", note))
    text = (
        "Equal responses give equal curves: the dotted line of B covers the line of A." if len(runs) > 1 else ""
    )
    return Section("Learning", parts, text)


def phases_of(run: RunData) -> dict[str, list[float]]:
    """Seconds of each phase in each step (0 where it did not run), means over the ranks, in the order of a step."""
    names = {name.removeprefix("time/") for row in run.steps for name in row if name.startswith("time/")}
    names -= {"step", "eval", "checkpoint"}  # the last two are counted to the step after theirs
    ordered = [name for name in PHASES if name in names] + sorted(names - PHASES.keys())
    return {name: [row.get(f"time/{name}") or 0.0 for row in run.steps] for name in ordered}


def time(run: RunData) -> Section:
    """Where the seconds of a step go."""
    phases = phases_of(run)
    if not phases:
        return Section("Time")
    bars = {(name, PHASES.get(name, "@6")): seconds for name, seconds in phases.items()}
    chart = stacked_chart(
        "Step time by phase",
        "seconds, mean of the ranks",
        [row["step"] for row in run.steps],
        bars,
        note="Idle: the rank has no request left and waits for the slowest one.",
        wide=True,
        height=340,
    )
    return Section("Time", [chart])


def lengths(runs: Sequence[RunData]) -> Section:
    """How long responses are, by step; the distribution of a single run."""
    metrics = (
        ("length/median", "median", "@3"),
        ("length/mean", "mean", "@1"),
        ("length/p95", "95 %", "@2"),
        ("length/max", "longest", "@6"),
    )
    parts = metric_chart(runs, "Response length", "tokens", metrics, log_switch=True)
    rows = [row for row in runs[0].rollouts if row["lengths"] and row["samples"]]
    if rows and len(runs) == 1:
        parts.insert(0, _length_heatmap(rows))
    return Section("Response lengths", parts, "The longest responses decide how long a rollout takes.")


def _length_heatmap(rows: Sequence[Row]) -> Chart:
    longest, bins = max(row["longest"] for row in rows), len(rows[0]["lengths"])
    shares = [[100 * row["lengths"][b] / row["samples"] for row in rows] for b in range(bins)]  # percent
    trace = {
        "type": "heatmap",
        "x": [row["step"] for row in rows],
        "y": [round(longest * (b + 0.5) / bins, 1) for b in range(bins)],
        # No colour where there was no response: the few longest ones must stay visible.
        "z": [[share**0.5 if share > 0 else None for share in of_bin] for of_bin in shares],
        "customdata": shares,
        "hovertemplate": "step %{x}<br>about %{y} tokens: %{customdata:.2f} % of the responses<extra></extra>",
        "colorscale": [[0, "@1/0.12"], [0.5, "@1/0.65"], [1, "@ink"]],
        "showscale": False,
    }
    note = "Darker: a larger share of the step's responses (square root); empty: none."
    return Chart("Distribution by step", [trace], "step", "tokens", note, layout={"hovermode": "closest"})


def idle(runs: Sequence[RunData]) -> Section:
    """What waiting cost and how much of it was used; of a single run, also which ranks waited."""
    if not any(run.total("idle/seconds") for run in runs):
        return Section("Idle time")
    metrics = (
        ("idle/seconds", "waited", "@3"),
        ("idle/recovered_seconds", "of these trained the drafter", "@training"),
    )
    parts = metric_chart(runs, "Idle and recovered seconds", "seconds, sum of the ranks", metrics)
    return Section("Idle time", parts + (_idle_by_rank(runs[0]) if len(runs) == 1 else []))


def _idle_by_rank(run: RunData) -> list[Part]:
    waited = run.idle_by_rank()
    if len(waited) < 2:
        return []
    bars = bar("idle seconds", [f"rank {r}" for r in waited], list(waited.values()), "@3")
    return [Chart("Idle seconds by rank", [bars], "", "seconds, all steps", _STRAGGLERS)]


def drafter(runs: Sequence[RunData]) -> Section:
    """How training the drafter goes."""
    overlap = (
        "1 − total variation distance between drafter and policy, at the first drafted token: how often it would be "
        "accepted by rejection sampling. On the responses that it trains on."
    )
    loss = [("drafter/loss_mean", "loss", "@2")]
    parts = metric_chart(runs, "Drafter loss", "loss, mean of the ranks", loss, log_switch=True)
    metrics = [("drafter/accept/1_mean", "1 − TV", "@1")]
    parts += metric_chart(
        runs, "1 − TV", "share", metrics, overlap, layout={"yaxis": {"rangemode": "normal"}}
    )
    return Section("Drafter", parts, "Trained in idle time, on the rollouts of the step.")
