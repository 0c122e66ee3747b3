"""`megatron-tlt report RUN_DIR`: a run as one page, finished or in progress. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Iterator

from megatron_tlt.observe import report_charts as charts
from megatron_tlt.observe.page import Page, Section, Table, Tile
from megatron_tlt.observe.report_rollout import rollout, step_views
from megatron_tlt.observe.report_samples import samples
from megatron_tlt.observe.report_speculation import speculation
from megatron_tlt.observe.runfiles import RunData, require_metrics

_LONGEST = 90  # characters of a setting's value


def run_page(run: RunData) -> Page:
    """The report of one run. Raises ConfigError where none of its metrics can be read."""
    require_metrics(run)
    page = Page(f"Run {run.name}", subtitle(run), tiles=tiles(run))
    if not run.steps:
        before = f" Evaluated before the first step: {accuracy(run, 0)}." if run.evals else ""
        page.verdict = f"No step is done yet: charts appear with the first one.{before}"
    page.sections = [
        charts.learning([run]),
        charts.time(run),
        rollout(run, step_views(run)),
        speculation([run]),
        charts.drafter([run]),
        charts.lengths([run]),
        charts.idle([run]),
        samples(run),
        Section("Settings", [Table(["field", "value"], list(settings(run).items()), wide=True)]),
    ]
    page.warnings = run.warnings
    page.footer = f"{run.run_dir.resolve()} · {written_now()}"
    return page


def written_now() -> str:
    """The end of a report: when it was written, and by which command."""
    return f"written {time.strftime('%Y-%m-%d %H:%M:%S %Z')} by megatron-tlt report"


def state_of(run: RunData) -> str:
    """ "finished", or how many steps are done."""
    if run.is_finished:
        return f"finished, {run.last_step} steps"
    of = f" of {run.num_steps}" if run.num_steps else ""
    return f"in progress or stopped, {run.last_step}{of} steps"


def subtitle(run: RunData) -> str:
    """Model, algorithm, ranks and state in a line."""
    model = str(run.config.get("model", {}).get("path", "")).rstrip("/").rpartition("/")[2]
    algorithm = str(run.config.get("algorithm", {}).get("name", ""))
    ranks = f"{len(run.ranks)} rank{'s' * (len(run.ranks) != 1)}"
    return " · ".join(part for part in (model, algorithm, ranks, state_of(run)) if part)


def accuracy(run: RunData, at: int) -> str:
    """Held-out accuracy of an evaluation, with its standard error."""
    row = run.evals[at]
    return f"{row.get('eval/pass@1') or 0:.3f} ± {row.get('eval/stderr') or 0:.3f}"


def seconds_text(seconds: float) -> str:
    """Seconds as "12.3 s", "2 min 5 s" or "2 h 1 min"."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def tiles(run: RunData) -> list[Tile]:
    """The numbers at the top of the page."""
    found = []
    if step_time := run.mean("time/step"):
        label = f"{run.last_step}" if run.num_steps is None else f"{run.last_step} / {run.num_steps}"
        total = seconds_text(run.total("time/step"))
        found.append(Tile("steps", label, f"{seconds_text(step_time)} each, {total}"))
    if run.evals:
        before = f"from {accuracy(run, 0)}" if len(run.evals) > 1 else "before the first step"
        found.append(Tile("held-out accuracy", accuracy(run, -1).partition(" ")[0], before))
    if reward := run.column("reward/mean")[1]:
        found.append(Tile("reward", f"{reward[-1]:.3f}", f"{reward[0]:.3f} in the first step"))
    if speed := run.mean("engine/tokens_per_s"):
        found.append(Tile("rollout", f"{speed:,.0f}", "tokens/s, all ranks"))
    emitted = run.total("engine/spec_emitted_tokens")
    if rows := run.total("engine/spec_row_steps"):
        share = emitted / max(1.0, run.total("engine/generated_tokens"))
        found.append(
            Tile("accepted length", f"{emitted / rows:.2f}", f"{share:.0%} of tokens in drafting steps")
        )
    if idle := run.total("idle/seconds"):
        used = run.total("idle/recovered_seconds")
        note = f"of {seconds_text(idle)} idle, all ranks: {seconds_text(used)}"
        found.append(Tile("idle time recovered", f"{used / idle:.0%}", note))
    return found


def settings(run: RunData) -> dict[str, str]:
    """The configuration: the value of each field, by its path."""
    return dict(_fields(run.config, ""))


def _fields(value: object, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _fields(inner, f"{path}.{key}".lstrip("."))
    else:
        text = "null" if value is None else str(value)
        yield path, text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
