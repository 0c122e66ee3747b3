"""The charts of a run that need its rows a step only: learning, time, lengths, idle time, drafter. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_tlt.observe.page import Chart, Part, Section, Table, Trace, bar, line
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
    "push": "@8",
    "log": "@6",
    "checkpoint": "@6",
}
_BARS = 120  # steps up to which each has a bar; of more, a bar is the mean of several
_SHOWN_RANKS = 32  # ranks up to which each has a bar
_NAMED_RANKS = 8  # ranks in the table of the slowest ones
_STRAGGLERS = (
    "The rank that waits least holds the others up: it had the longest answers or did work of others, or its machine "
    "is slow."
)


def metric_chart(
    run: RunData, title: str, unit: str, metrics: Sequence[tuple[str, str, str]], note: str = "", **more: Any
) -> list[Part]:
    """A chart by step of metrics (name, label, colour); nothing if the run has none of them."""
    columns = [(label, run.column(name), colour) for name, label, colour in metrics]
    lines = [line(label, *column, colour) for label, column, colour in columns if column[0]]
    return [Chart(title, lines, "step", unit, note, **more)] if lines else []


def stacked_chart(
    title: str, unit: str, steps: Sequence[int], bars: Mapping[tuple[str, str], Sequence[float]], **more: Any
) -> Chart:
    """Bars by step on top of each other, by (label, colour)."""
    traces = [bar(label, *grouped(steps, values), colour) for (label, colour), values in bars.items()]
    layout = {"barmode": "stack", "bargap": 0.15, "legend": {"traceorder": "normal"}} | more.pop("layout", {})
    return Chart(title, traces, "step", unit, layout=layout, **more)


def groups_of_steps(count: int, most: int = _BARS) -> Iterator[slice]:
    """At most `most` slices of equal length that cover `count` steps."""
    size = max(1, -(-count // most))
    return (slice(start, start + size) for start in range(0, count, size))


def grouped(steps: Sequence[int], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Steps and values as means over `groups_of_steps`."""
    parts = list(groups_of_steps(len(steps)))
    return [_mean(steps[part]) for part in parts], [_mean(values[part]) for part in parts]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def learning(run: RunData) -> Section:
    """Reward and accuracy, by step and held out."""
    metrics = (("reward/mean", "reward", "@1"), ("reward/accuracy", "accuracy", "@3"))
    parts = metric_chart(run, "Reward and accuracy of the rollouts", "mean over answers", metrics)
    return Section("Learning", parts + ([_evaluation(run)] if run.evals else []))


def _evaluation(run: RunData) -> Chart:
    names = {name for row in run.evals for name in row if name.startswith("eval/pass@")}
    traces = []
    for at, name in enumerate(sorted(names, key=lambda name: (len(name), name))):
        rows = [row for row in run.evals if row.get(name) is not None]
        steps, values = [row["step"] for row in rows], [row[name] for row in rows]
        trace = line(name.removeprefix("eval/"), steps, values, f"@{at % 8 + 1}", mode="lines+markers")
        if name == "eval/pass@1":
            errors = [row.get("eval/stderr") or 0.0 for row in rows]
            trace["error_y"] = {"type": "data", "array": errors, "thickness": 1.2, "width": 4}
        traces.append(trace)
    note = "Bars: one standard error. The same held-out prompts every time."
    return Chart("Held-out accuracy", traces, "steps done", "share of prompts", note)


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
    total = run.total("time/step")
    rows = [
        (name, sum(seconds), _mean(seconds), f"{sum(seconds) / total:.1%}" if total else "")
        for name, seconds in sorted(phases.items(), key=lambda item: -sum(item[1]))
    ]
    table = Table(["phase", "seconds", "a step", "share"], rows, "All steps together")
    metrics = [("engine/tokens_per_s", "tokens/s", "@1")]
    return Section(
        "Time", [chart, table, *metric_chart(run, "Rollout speed", "tokens/s, all ranks", metrics)]
    )


def lengths(run: RunData) -> Section:
    """How long answers are, by step."""
    rows = [row for row in run.rollouts if row.get("lengths") and row.get("samples")]
    metrics = (
        ("length/median", "median", "@3"),
        ("length/mean", "mean", "@1"),
        ("length/p95", "95 %", "@2"),
        ("length/max", "longest", "@6"),
    )
    chart = metric_chart(run, "Response length", "tokens", metrics, log_switch=True)
    parts = [*([_length_heatmap(rows)] if rows else []), *chart]
    return Section("Response lengths", parts, "The longest answers decide how long a rollout takes.")


def _length_heatmap(rows: Sequence[Row]) -> Chart:
    groups = [rows[part] for part in groups_of_steps(len(rows))]
    longest, bins = max(row["longest"] for row in rows), len(rows[0]["lengths"])
    shares = []  # by group, then by bin: percent of the answers
    for group in groups:
        total = sum(row["samples"] for row in group)
        shares.append([100 * sum(row["lengths"][b] for row in group) / total for b in range(bins)])
    trace = {
        "type": "heatmap",
        "x": [group[-1]["step"] for group in groups],
        "y": [round(longest * (b + 0.5) / bins, 1) for b in range(bins)],
        # No colour where there was no answer: the few longest ones must stay visible.
        "z": [[share[b] ** 0.5 if share[b] > 0 else None for share in shares] for b in range(bins)],
        "customdata": [[share[b] for share in shares] for b in range(bins)],
        "hovertemplate": "step %{x}<br>about %{y} tokens: %{customdata:.2f} % of the answers<extra></extra>",
        "colorscale": [[0, "@1/0.12"], [0.5, "@1/0.65"], [1, "@ink"]],
        "showscale": False,
    }
    note = "Darker: a larger share of the step's answers (square root); empty: none."
    return Chart("Distribution by step", [trace], "step", "tokens", note, layout={"hovermode": "closest"})


def idle(run: RunData) -> Section:
    """What waiting cost and how much of it was used."""
    steps, waited = run.column("idle/seconds")
    if not any(waited):
        return Section("Idle time")
    by_step = dict(zip(*run.column("idle/recovered_seconds"), strict=True))
    recovered = [by_step.get(step, 0.0) for step in steps]
    lost = [max(0.0, a - b) for a, b in zip(waited, recovered, strict=True)]
    bars = {("trained in it", "@training"): recovered, ("waited", "@idle"): lost}
    note = "The upper end of a bar is all that ranks waited in the step."
    chart = stacked_chart("Idle and recovered seconds", "seconds, sum of the ranks", steps, bars, note=note)
    return Section("Idle time", [chart, *_idle_by_rank(run)])


def _idle_by_rank(run: RunData) -> list[Part]:
    waited = run.idle_by_rank()
    if len(waited) < 2:
        return []
    unit = "seconds, all steps"
    if len(waited) <= _SHOWN_RANKS:
        bars = bar(
            "idle seconds", [f"rank {r}" for r in sorted(waited)], [waited[r] for r in sorted(waited)], "@3"
        )
        return [Chart("Idle seconds by rank", [bars], "", unit, _STRAGGLERS)]
    ranks = sorted(waited, key=lambda rank: waited[rank])
    curve = line("idle seconds", range(len(ranks)), [waited[r] for r in ranks], "@3", mode="lines")
    curve |= {"fill": "tozeroy", "fillcolor": "@3/0.2", "text": [f"rank {r}" for r in ranks]}
    curve["hovertemplate"] = "%{text}: %{y:.1f} s<extra></extra>"
    layout = {"hovermode": "closest", "xaxis": {"showticklabels": False}}
    slowest = [(f"rank {r}", waited[r], waited[r] / max(1, len(run.steps))) for r in ranks[:_NAMED_RANKS]]
    return [
        Chart(f"Idle seconds of {len(ranks)} ranks, least first", [curve], "", unit, layout=layout),
        Table(["rank", "idle seconds", "a step"], slowest, "The slowest ranks", _STRAGGLERS),
    ]


def drafter(run: RunData) -> Section:
    """How training the drafter goes."""
    overlap = (
        "1 − total variation distance between drafter and policy, at the first drafted token: how often it would be "
        "accepted by rejection sampling. On the answers that it trains on."
    )
    loss = [("drafter/loss_mean", "loss", "@2")]
    parts = metric_chart(run, "Drafter loss", "loss, mean of the ranks", loss, log_switch=True)
    metrics = [("drafter/accept/1_mean", "1 − TV", "@1")]
    parts += metric_chart(run, "1 − TV", "share", metrics, overlap, layout={"yaxis": {"rangemode": "normal"}})
    steps, updates = run.column("drafter/steps")
    if any(updates):
        bars: Trace = bar("updates", *grouped(steps, updates), "@training")
        unit = "updates, sum of the ranks"
        parts.append(Chart("Updates of the drafter", [bars], "step", unit, wide=True, height=240))
    return Section("Drafter", parts, "Trained in idle time, on the rollouts of the step.")
