"""The charts of a run that need a row a step and no more: learning, time, lengths, idle time, drafter. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_tlt.observe.page import Chart, Part, Section, Table, Trace
from megatron_tlt.observe.runfiles import RunData

# Phases in the order of a step, each with its colour; others share the last one.
PHASES = {
    "rollout": "@3",
    "idle": "@idle",
    "score": "@5",
    "exchange": "@7",
    "logprobs": "@4",
    "update": "@1",
    "merge": "@training",
    "push": "@8",
    "log": "@6",
    "checkpoint": "@6",
}
_BARS = 120  # steps beyond it are shown as means of equal numbers of them
_SHOWN_RANKS = 32
_NAMED = 8


def line(name: str, x: Sequence[Any], y: Sequence[Any], colour: str, **more: Any) -> Trace:
    """A line; with markers too while there are few points."""
    mode = "lines+markers" if len(x) <= 40 else "lines"
    style = {"color": colour, "width": 2}
    return {"type": "scatter", "mode": mode, "name": name, "x": list(x), "y": list(y), "line": style} | more


def grouped(
    steps: Sequence[int], values: Sequence[float], most: int = _BARS
) -> tuple[list[float], list[float]]:
    """Means of equal numbers of neighbours, so that at most `most` are left."""
    every = -(-len(steps) // most) if steps else 1
    parts = range(0, len(steps), every)
    xs = [sum(steps[i : i + every]) / len(steps[i : i + every]) for i in parts]
    return xs, [sum(values[i : i + every]) / len(values[i : i + every]) for i in parts]


def learning(run: RunData) -> Section:
    """Reward and accuracy, by step and held out."""
    parts: list[Part] = []
    reward = [
        line(label, *run.column(name), colour)
        for name, label, colour in (("reward/mean", "reward", "@1"), ("reward/accuracy", "accuracy", "@3"))
        if run.column(name)[0]
    ]
    if reward:
        parts.append(Chart("Reward and accuracy of the rollouts", reward, "step", "mean over answers"))
    if run.evals:
        parts.append(_evaluation(run))
    return Section("Learning", parts)


def _evaluation(run: RunData) -> Chart:
    ks = sorted({name for row in run.evals for name in row if name.startswith("eval/pass@")}, key=_k_of)
    traces = []
    for at, name in enumerate(ks):
        rows = [row for row in run.evals if row.get(name) is not None]
        trace = line(
            name.removeprefix("eval/"), [r["step"] for r in rows], [r[name] for r in rows], f"@{at % 8 + 1}"
        )
        trace["mode"] = "lines+markers"
        if name == "eval/pass@1":
            errors = [r.get("eval/stderr") or 0.0 for r in rows]
            trace["error_y"] = {"type": "data", "array": errors, "thickness": 1.2, "width": 4}
        traces.append(trace)
    note = "Bars: one standard error. The same held-out prompts every time."
    return Chart("Held-out accuracy", traces, "steps done", "share of prompts", note)


def _k_of(name: str) -> int:
    digits = name.partition("@")[2]
    return int(digits) if digits.isdigit() else 0


def phases_of(run: RunData) -> dict[str, tuple[list[int], list[float]]]:
    """Seconds of each phase by step, means over the ranks, in the order of a step."""
    names = {name.removeprefix("time/") for row in run.steps for name in row if name.startswith("time/")}
    names -= {"step", "eval", "checkpoint"}  # these two are counted to the step after theirs
    ordered = [name for name in PHASES if name in names] + sorted(names - PHASES.keys())
    return {name: run.column(f"time/{name}") for name in ordered}


def time(run: RunData) -> Section:
    """Where the seconds of a step go."""
    phases = phases_of(run)
    if not phases:
        return Section("Time")
    bars, rows = [], []
    total = sum(run.column("time/step")[1])
    for name, (steps, seconds) in phases.items():
        x, y = grouped(steps, seconds)
        marker = {"color": PHASES.get(name, "@6")}
        bars.append({"type": "bar", "name": name, "x": x, "y": y, "marker": marker})
        spent = sum(seconds)
        rows.append((name, spent, spent / max(1, len(seconds)), f"{spent / total:.1%}" if total else ""))
    rows.sort(key=lambda row: -row[1])
    speed = run.column("engine/tokens_per_s")
    layout = {"barmode": "stack", "bargap": 0.15, "legend": {"traceorder": "normal"}}
    parts: list[Part] = [
        Chart(
            "Step time by phase",
            bars,
            "step",
            "seconds, mean of the ranks",
            "Idle: a rank has nothing left to answer and waits for the slowest one.",
            layout=layout,
            wide=True,
            height=340,
        ),
        Table(["phase", "seconds", "a step", "share"], rows, "All steps together"),
    ]
    if speed[0]:
        chart = Chart("Rollout speed", [line("tokens/s", *speed, "@1")], "step", "tokens/s, all ranks")
        parts.append(chart)
    return Section("Time", parts)


def lengths(run: RunData) -> Section:
    """How long answers are, and how that changes."""
    parts: list[Part] = []
    rows = [row for row in run.rollouts if row.get("lengths") and row.get("samples")]
    if rows:
        parts.append(_heat(rows))
    lines = [
        line(label, *run.column(f"length/{name}"), colour)
        for name, label, colour in (
            ("median", "median", "@3"),
            ("mean", "mean", "@1"),
            ("p95", "95 %", "@2"),
            ("max", "longest", "@6"),
        )
        if run.column(f"length/{name}")[0]
    ]
    if lines:
        parts.append(Chart("Response length", lines, "step", "tokens", log_switch=True))
    return Section("Response lengths", parts, "The long tail is what holds a rollout up.")


def _heat(rows: Sequence[dict[str, Any]]) -> Chart:
    every = -(-len(rows) // _BARS)
    groups = [rows[i : i + every] for i in range(0, len(rows), every)]
    longest, bins = max(row["longest"] for row in rows), len(rows[0]["lengths"])
    shares = []  # by group, then by bin
    for group in groups:
        total = sum(row["samples"] for row in group)
        shares.append([100 * sum(row["lengths"][b] for row in group) / total for b in range(bins)])
    trace = {
        "type": "heatmap",
        "x": [group[-1]["step"] for group in groups],
        "y": [round(longest * (b + 0.5) / bins, 1) for b in range(bins)],
        # No colour where there was no answer: the tail must not drown in the background.
        "z": [[share[b] ** 0.5 if share[b] else None for share in shares] for b in range(bins)],
        "customdata": [[share[b] for share in shares] for b in range(bins)],
        "hovertemplate": "step %{x}<br>about %{y} tokens: %{customdata:.2f} % of the answers<extra></extra>",
        "colorscale": [[0, "@1/0.12"], [0.5, "@1/0.65"], [1, "@ink"]],
        "showscale": False,
    }
    note = "Darker: a larger share of the step's answers (square root); empty: none."
    layout: dict[str, Any] = {"hovermode": "closest"}
    return Chart("Distribution by step", [trace], "step", "tokens", note, layout=layout)


def idle(run: RunData) -> Section:
    """What waiting cost and how much of it was used."""
    waited = run.column("idle/seconds")
    if not waited[0] or not any(waited[1]):
        return Section("Idle time")
    bars = []
    used = dict(zip(*run.column("idle/recovered_seconds"), strict=True))
    recovered = [used.get(step, 0.0) for step in waited[0]]
    lost = [max(0.0, a - b) for a, b in zip(waited[1], recovered, strict=True)]
    for name, values, colour in (("trained in it", recovered, "@training"), ("waited", lost, "@idle")):
        x, y = grouped(waited[0], values)
        bars.append({"type": "bar", "name": name, "x": x, "y": y, "marker": {"color": colour}})
    parts: list[Part] = [
        Chart(
            "Idle and recovered seconds",
            bars,
            "step",
            "seconds, sum of the ranks",
            "The upper end of a bar is all that ranks waited in the step.",
            layout={"barmode": "stack", "bargap": 0.15},
        )
    ]
    return Section("Idle time", parts + _by_rank(run))


def _by_rank(run: RunData) -> list[Part]:
    waited = run.idle_by_rank()
    if len(waited) < 2:
        return []
    ordered = sorted(waited.items(), key=lambda item: item[1])
    if len(ordered) <= _SHOWN_RANKS:
        ranks = sorted(waited)
        values = [waited[r] for r in ranks]
        bar: Trace = {
            "type": "bar",
            "x": [f"rank {r}" for r in ranks],
            "y": values,
            "marker": {"color": "@3"},
        }
        bar |= {"name": "idle seconds", "showlegend": False}
        return [Chart("Idle seconds by rank", [bar], "", "seconds, all steps", _STRAGGLERS)]
    every = list(range(len(ordered)))
    sorted_line = line("idle seconds", every, [value for _, value in ordered], "@3", showlegend=False)
    sorted_line |= {"mode": "lines", "fill": "tozeroy", "fillcolor": "@3/0.2"}
    sorted_line["text"] = [f"rank {rank}" for rank, _ in ordered]
    sorted_line["hovertemplate"] = "%{text}: %{y:.1f} s<extra></extra>"
    steps = max(1, len(run.steps))
    worst = [(f"rank {rank}", value, value / steps) for rank, value in ordered[:_NAMED]]
    most = [(f"rank {rank}", value, value / steps) for rank, value in ordered[: -_NAMED - 1 : -1]]
    head = ["rank", "idle seconds", "a step"]
    layout: dict[str, Any] = {"hovermode": "closest", "xaxis": {"showticklabels": False}}
    return [
        Chart(
            f"Idle seconds of {len(ordered)} ranks, least first",
            [sorted_line],
            "",
            "seconds, all steps",
            layout=layout,
        ),
        Table(head, worst, "The slowest ranks", _STRAGGLERS),
        Table(head, most, "The ranks that waited most"),
    ]


_STRAGGLERS = (
    "Who waits least holds the others up: it had the longest answers, helped others, or its machine is slow."
)


def drafter(run: RunData) -> Section:
    """How training the drafter goes."""
    parts: list[Part] = []
    loss = run.column("drafter/loss_mean")
    if loss[0]:
        trace = line("loss", *loss, "@2", showlegend=False)
        parts.append(Chart("Drafter loss", [trace], "step", "loss, mean of the ranks", log_switch=True))
    overlap = run.column("drafter/accept/1_mean")
    if overlap[0]:
        trace = line("1 − TV", *overlap, "@1", showlegend=False)
        note = (
            "1 − total variation distance between drafter and policy, at the first drafted token: how often it would "
            "be accepted by rejection sampling. On the answers that it trains on."
        )
        layout = {"yaxis": {"rangemode": "normal"}}
        parts.append(Chart("1 − TV", [trace], "step", "share", note, layout=layout))
    updates = run.column("drafter/steps")
    if updates[0] and any(updates[1]):
        x, y = grouped(*updates)
        bar: Trace = {"type": "bar", "name": "updates", "x": x, "y": y, "marker": {"color": "@training"}}
        bar["showlegend"] = False
        parts.append(
            Chart("Updates of the drafter", [bar], "step", "updates, sum of the ranks", wide=True, height=240)
        )
    return Section("Drafter", parts, "Trained in idle time, on the rollouts of the step.")
