"""`megatron-tlt report RUN_DIR`: a run as one page. Torch-free; reads files only, also of a run in progress."""

from __future__ import annotations

import time
from pathlib import Path

from megatron_tlt.observe import report_charts as charts
from megatron_tlt.observe.page import Page, Section, Table, Tile
from megatron_tlt.observe.report_rollout import rollout, step_views
from megatron_tlt.observe.report_samples import samples
from megatron_tlt.observe.report_speculation import speculation
from megatron_tlt.observe.runfiles import RunData, read_run

_SETTINGS = (
    "model.path",
    "algorithm.name",
    "actor.tp",
    "actor.pp",
    "rollout.backend",
    "rollout.tp",
    "rollout.samples_per_prompt",
    "rollout.max_tokens",
    "rollout.dtype",
    "rollout.speculation.drafter",
    "rollout.speculation.selector",
    "rollout.speculation.draft_len",
    "idle.train_drafter",
    "idle.work_stealing",
    "train.prompts_per_step",
    "train.num_steps",
    "train.seed",
)


def run_page(run_dir: str | Path) -> Page:
    """The report of one run. Raises ConfigError where there is none."""
    run = read_run(run_dir)
    page = Page(f"Run {run.name}", subtitle(run), tiles=tiles(run))
    if not run.steps:
        page.verdict = "No step is done yet: charts appear with the first one. " + _evaluated(run)
    views = step_views(run)
    page.sections = [
        charts.learning(run),
        charts.time(run),
        rollout(run, views),
        speculation(run),
        charts.drafter(run),
        charts.lengths(run),
        charts.idle(run),
        samples(run),
        settings(run),
    ]
    page.footer = (
        f"{run.run_dir.resolve()} · written {time.strftime('%Y-%m-%d %H:%M:%S %Z')} by megatron-tlt report"
    )
    return page


def _evaluated(run: RunData) -> str:
    return f"Evaluated before the first step: {accuracy(run, 0)}." if run.evals else ""


def state_of(run: RunData) -> str:
    """ "finished", or how far it is."""
    steps = f"{run.last_step} of {run.num_steps} steps" if run.num_steps else f"{run.last_step} steps"
    return f"finished, {run.last_step} steps" if run.is_finished else f"in progress or stopped, {steps}"


def subtitle(run: RunData) -> str:
    """What ran where, in a line."""
    model = str(run.config.get("model", {}).get("path", "")).rstrip("/").rpartition("/")[2]
    algorithm = str(run.config.get("algorithm", {}).get("name", ""))
    ranks = f"{len(run.ranks)} rank{'s' if len(run.ranks) != 1 else ''}"
    return " · ".join(part for part in (model, algorithm, ranks, state_of(run)) if part)


def accuracy(run: RunData, at: int) -> str:
    """Held-out accuracy of an evaluation, with its standard error."""
    row = run.evals[at]
    return f"{row.get('eval/pass@1', 0):.3f} ± {row.get('eval/stderr', 0):.3f}"


def mean(values: list[float]) -> float:
    """The mean; 0 of nothing."""
    return sum(values) / len(values) if values else 0.0


def seconds_text(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def tiles(run: RunData) -> list[Tile]:
    """The numbers to see first."""
    found = []
    step_times = run.column("time/step")[1]
    if step_times:
        label = f"{run.last_step}" if run.num_steps is None else f"{run.last_step} / {run.num_steps}"
        found.append(
            Tile("steps", label, f"{seconds_text(mean(step_times))} each, {seconds_text(sum(step_times))}")
        )
    if run.evals:
        first = f"from {accuracy(run, 0)}" if len(run.evals) > 1 else "before the first step"
        found.append(Tile("held-out accuracy", f"{run.evals[-1].get('eval/pass@1', 0):.3f}", first))
    reward = run.column("reward/mean")[1]
    if reward:
        found.append(Tile("reward", f"{reward[-1]:.3f}", f"{reward[0]:.3f} in the first step"))
    speed = run.column("engine/tokens_per_s")[1]
    if speed:
        found.append(Tile("rollout", f"{mean(speed):,.0f}", "tokens/s, all ranks"))
    rows, emitted = (sum(run.column(f"engine/spec_{n}")[1]) for n in ("row_steps", "emitted_tokens"))
    if rows:
        share = emitted / max(1.0, sum(run.column("engine/generated_tokens")[1]))
        found.append(
            Tile("accepted length", f"{emitted / rows:.2f}", f"{share:.0%} of tokens in drafting steps")
        )
    idle, used = sum(run.column("idle/seconds")[1]), sum(run.column("idle/recovered_seconds")[1])
    if idle:
        note = f"of {seconds_text(idle)} idle, all ranks: {seconds_text(used)}"
        found.append(Tile("idle time recovered", f"{used / idle:.0%}", note))
    stolen = sum(run.column("idle/stolen_requests")[1])
    if stolen:
        found.append(Tile("stolen requests", f"{stolen:,.0f}", "answered for other ranks"))
    return found


def settings(run: RunData) -> Section:
    """The settings that shape a run, and where to find the others."""
    rows = []
    for path in _SETTINGS:
        value: object = run.config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            rows.append((path, str(value)))
    note = f"All of them: {run.run_dir / 'config.json'}"
    return Section("Settings", [Table(["field", "value"], rows, note=note, wide=True)] if rows else [])
