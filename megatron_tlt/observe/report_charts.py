"""Charts of metrics by step, of one run or two: learning, time, response lengths, idle time, drafter. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_tlt.observe import colours
from megatron_tlt.observe.page import Chart, PageSection, Part, bar, line
from megatron_tlt.observe.runfiles import RunData

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
    "log": colours.RED,
    "checkpoint": colours.RED,
}


def labelled(runs: Sequence[RunData]) -> list[tuple[RunData, str, str]]:
    """(run, end of its labels, dash of its lines): of two runs, A has solid lines and B dotted ones."""
    if len(runs) == 1:
        return [(runs[0], "", "solid")]
    return [(runs[0], ", A", "solid"), (runs[1], ", B", "dot")]


def metric_chart(
    runs: Sequence[RunData], title: str, unit: str, metrics: Mapping[str, str], note: str = "", **more: Any
) -> list[Part]:
    """A chart by step of metrics (name to label) of one or two runs; nothing if they have none of them."""
    lines = [
        line(label + end, *run.column(name), "", line={"color": colour, "dash": dash})
        for (name, label), colour in zip(metrics.items(), colours.CYCLE, strict=False)
        for run, end, dash in labelled(runs)
        if run.column(name)[0]
    ]
    return [Chart(title, lines, "step", unit, note, **more)] if lines else []


def learning(runs: Sequence[RunData]) -> PageSection:
    """Reward and accuracy, by step and held out."""
    metrics = {"reward/mean": "reward", "reward/accuracy": "accuracy"}
    parts = metric_chart(runs, "Reward and accuracy of the rollouts", "mean over responses", metrics)
    parts += metric_chart(runs, "Reverse KL to the teacher", "nats a token", {"policy/teacher_kl": "teacher KL"})
    names = {name for run in runs for row in run.evals for name in row if name.startswith("eval/pass@")}
    traces = []
    for at, name in enumerate(sorted(names, key=lambda name: (len(name), name))):
        for run, end, dash in labelled(runs):
            label, style = (
                name.removeprefix("eval/") + end,
                {"color": colours.CYCLE[at % len(colours.CYCLE)], "dash": dash},
            )
            traces.append(line(label, *run.column(name, run.evals), "", line=style))
            if name == "eval/pass@1":
                traces[-1]["error_y"] = {"type": "data", "array": run.column("eval/stderr", run.evals)[1]}
    if traces:
        note = "Bars: one standard error. Every evaluation has the same held-out prompts."
        parts.append(Chart("Held-out accuracy", traces, "steps done", "share of prompts", note))
    text = "Where both runs have the same responses, the lines of A and B coincide." if len(runs) > 1 else ""
    return PageSection("Learning", parts, text)


def phases_of(run: RunData) -> dict[str, list[float]]:
    """Seconds of each phase in each step (0 where it did not run), means over the ranks, in the order of a step."""
    names = {name.removeprefix("time/") for row in run.steps for name in row if name.startswith("time/")}
    names -= {"step", "eval", "checkpoint"}  # the last two are counted to the step after theirs
    ordered = [name for name in PHASE_COLOURS if name in names] + sorted(names - PHASE_COLOURS.keys())
    return {name: [row.get(f"time/{name}") or 0.0 for row in run.steps] for name in ordered}


def time(run: RunData) -> PageSection:
    """Seconds of a step by phase."""
    steps = [row["step"] for row in run.steps]
    bars = [
        bar(name, steps, seconds, PHASE_COLOURS.get(name, colours.RED)) for name, seconds in phases_of(run).items()
    ]
    note = "Idle: the rank has no request left, while other ranks still generate."
    title, unit, layout = "Step time by phase", "seconds, mean of the ranks", {"barmode": "stack"}
    chart = Chart(title, bars, "step", unit, note, layout=layout, wide=True, height=340)
    return PageSection("Time", [chart] if bars else [])


def lengths(runs: Sequence[RunData]) -> PageSection:
    """How long responses are, by step."""
    metrics = {
        "length/median": "median",
        "length/mean": "mean",
        "length/p95": "95 %",
        "length/max": "longest",
    }
    parts = metric_chart(runs, "Response length", "tokens", metrics, wide=True, log_switch=True)
    return PageSection("Response lengths", parts, "The longest responses decide how long a rollout takes.")


def carried(runs: Sequence[RunData]) -> PageSection:
    """Responses that steps leave unfinished, and the ages of trained tokens; nothing without `rollout.carry_over`."""
    counts = {"unfinished": "unfinished responses", "waiting_groups": "waiting groups", "new_prompts": "new prompts"}
    parts = metric_chart(
        runs, "Carried over", "at the end of the step", {f"carry_over/{name}": label for name, label in counts.items()}
    )
    ages = {"carry_over/token_age": "mean", "carry_over/token_age_max": "oldest", "carry_over/off_policy": "share > 0"}
    note = "Updates between the policy that drew a token and the one that is trained."
    parts += metric_chart(runs, "Age of trained tokens", "updates", ages, note)
    text = "A response gets rollout.carry_over tokens a step; a group is trained when its last member has ended."
    return PageSection("Partial rollouts", parts, text)


def idle(runs: Sequence[RunData]) -> PageSection:
    """Idle seconds and the parts of them that were used; of a single run, also by rank."""
    if not any(run.total("idle/seconds") for run in runs):
        return PageSection("Idle time")
    metrics = {"idle/seconds": "idle", "idle/recovered_seconds": "trained the drafter"}
    metrics |= {"pre_rollout/seconds": "pre-rolled"}
    parts = metric_chart(runs, "Idle and recovered seconds", "seconds, sum of the ranks", metrics)
    note = "Tokens that an idle replica had decoded in the step before, and that the step's policy drew again."
    shares = {"pre_rollout/drafted_share": "accepted pre-rolled tokens"}
    parts += metric_chart(runs, "Tokens that were pre-rolled", "share of a step's tokens", shares, note)
    idle_by_rank = runs[0].idle_by_rank() if len(runs) == 1 else {}
    if len(idle_by_rank) > 1:
        note = "The rank with the least idle time has the longest responses or the slowest machine."
        bars = [bar("idle", list(idle_by_rank), list(idle_by_rank.values()), colours.BLUE)]
        layout = {"xaxis": {"type": "category"}}
        parts.append(Chart("Idle seconds by rank", bars, "rank", "seconds, all steps", note, layout=layout))
    return PageSection("Idle time", parts)


def drafter(runs: Sequence[RunData]) -> PageSection:
    """Loss and acceptance of the drafter's training."""
    loss = {"drafter/loss_mean": "loss"}
    parts = metric_chart(runs, "Drafter loss", "loss, mean of the ranks", loss)
    note = (
        "1 − total variation distance between drafter and policy at the first drafted token: the acceptance rate of "
        "rejection sampling, on the responses of the training."
    )
    parts += metric_chart(runs, "1 − TV", "share", {"drafter/accept/1_mean": "1 − TV"}, note)
    return PageSection("Drafter", parts, "Trained in idle time, on the rollouts of the step.")
