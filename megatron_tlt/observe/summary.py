"""The figures of a run, from its metrics: printed at its end, and at the top of its report. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from megatron_tlt.observe.jsonl import JsonRow
from megatron_tlt.observe.runfiles import RunData

_NEXT_TO_NONE = 0.05  # share of time or tokens


class Stat(NamedTuple):
    """One number, its `value` as text."""

    label: str
    value: str
    note: str = ""


def print_summary(run: RunData, paths: Mapping[str, Path], console: Console) -> None:
    """Prints two tables: seconds by phase, and the figures with the paths."""
    total = run.total("time/step")
    seconds = {name: run.total(f"time/{name}") for name in run.phases}
    seconds = dict(sorted(seconds.items(), key=lambda item: -item[1]))
    seconds["other"] = max(0.0, total - sum(seconds.values()))
    phases = Table("phase", "seconds, mean of the ranks", "share")
    for name, value in seconds.items():
        phases.add_row(name, f"{value:.1f}", f"{value / total:.1%}" if total else "")
    for column in phases.columns[1:]:
        column.justify = "right"
    others = Table("what", "value", show_header=False)
    others.columns[1].overflow = "fold"
    for figure in figures(run):
        others.add_row(figure.label, f"{figure.value}  {figure.note}".rstrip())
    for name, path in paths.items():
        others.add_row(name, str(path))
    console.print(phases, others)


def figures(run: RunData) -> Iterator[Stat]:
    """The numbers of a run, over all its steps."""
    if total := run.total("time/step"):
        label = f"{run.last_step}" if run.num_steps is None else f"{run.last_step} / {run.num_steps}"
        whole = run.column("time/step", run.whole_steps)[1]
        each = f"{seconds_text(sum(whole) / len(whole))} each, " if whole else ""
        yield Stat("steps", label, f"{each}{seconds_text(total)}")
    yield from _evaluations(run)
    if reward := run.column("reward/mean")[1]:
        yield Stat("reward", f"{reward[-1]:.3f}", f"in the last step, {reward[0]:.3f} in the first")
    if failed := run.total("reward/failures"):
        yield Stat("rewards failed", f"{failed:,.0f}", "of all steps: recorded as rewards.failure_value")
    tokens, rollouts = run.total("engine/generated_tokens"), run.total("time/rollout") + run.total("time/idle")
    if tokens and rollouts:
        yield Stat("rollout", f"{tokens / rollouts:,.0f}", f"tokens/s, all ranks; {tokens:,.0f} tokens")
    if rows := run.total("engine/spec_row_steps"):
        emitted = run.total("engine/spec_emitted_tokens")
        share = emitted / max(1.0, tokens)
        note = f"{share:.0%} of tokens in steps with a draft"
        note += ": few requests had a draft, or plain decoding was faster" if share < _NEXT_TO_NONE else ""
        yield Stat("accepted length", f"{emitted / rows:.2f}", note)
    idle = run.total("idle/seconds")
    if used := run.total("idle/recovered_seconds"):
        note = f"{seconds_text(used)} of {seconds_text(idle)}, all ranks; {run.total('drafter/steps'):,.0f} steps"
        yield Stat("idle time that trained the drafter", f"{used / idle:.0%}", note)
    if pre_rolling := run.total("pre_rollout/seconds"):
        note = f"{seconds_text(pre_rolling)}, {run.total('pre_rollout/tokens'):,.0f} tokens"
        if accepted := run.total("engine/spec_pre_rolled_accepted"):
            note += f"; {accepted / max(1.0, tokens):.0%} of all tokens were pre-rolled"
        yield Stat("idle time that pre-rolled", f"{pre_rolling / max(idle, pre_rolling):.0%}", note)
    if parked := run.total("engine/parked_seconds"):
        used = run.total("env/recovered_seconds")
        note = f"all ranks; the drafter trained in {seconds_text(used)} of it"
        yield Stat("waiting for environments", seconds_text(parked), note)
    if unfinished := run.column("carry_over/unfinished")[1]:
        age = run.mean("carry_over/token_age")
        note = f"responses after the last step; trained tokens are {age:.2f} updates old"
        yield Stat("carried over", f"{unfinished[-1]:.0f}", note)
    yield from _tail(run)


def _evaluations(run: RunData) -> Iterator[Stat]:
    """What was learned, and what it took to see it."""
    if run.evals:
        alike = [row for row in run.evals if row["step"] > run.measured_since] or run.evals[-1:]
        before = _rise(alike[0], alike[-1]) if len(alike) > 1 else when(alike[0])
        if len(alike) < len(run.evals):
            before += "; earlier ones were measured otherwise (config_changes.jsonl)"
        last, _, error = accuracy(alike[-1]).partition(" ")
        yield Stat("held-out accuracy", last, ", ".join(filter(None, [error, before])))
    if seconds := run.column("eval/seconds", run.evals)[1]:
        number = f"{len(seconds)} evaluation{'s' * (len(seconds) > 1)}"
        yield Stat("evaluating", seconds_text(sum(seconds)), f"{number}, in no step's seconds")


def _tail(run: RunData) -> Iterator[Stat]:
    """How much of the rollouts is a tail, in which some rank waits for others or few responses run.

    Drafts for few responses and training in idle time have no more than that to win from.
    """
    rollouts, steps = run.total("time/rollout") + run.total("time/idle"), run.total("time/step")
    medians = run.column("length/median")[1]
    if not rollouts or not medians or steps <= rollouts:
        return
    longest = sum(run.column("length/max")[1]) / max(1.0, sum(medians))
    tail, waiting = run.seconds_some_rank_waits() / rollouts, run.total("time/idle") / rollouts
    each = sorted(seconds / rollouts for seconds in run.idle_seconds())
    waits = f"{waiting:.0%} of all ranks' time" + (f" ({each[0]:.0%} to {each[-1]:.0%} of a rank's)" if each else "")
    note = f"of the rollouts some rank waits, {waits}; longest response {longest:.1f} x median"
    if tail < _NEXT_TO_NONE and longest < 2:  # else few responses run at a rollout's end, also on a single rank
        yield Stat("rollouts have no tail", f"{tail:.0%}", f"{note}: TLT has next to nothing to win")
    else:
        limit = f"rollouts in no time would make steps {steps / (steps - rollouts):.1f}x as fast"
        yield Stat("tail of the rollouts", f"{tail:.0%}", f"{note}; {limit}")


def _rise(first: JsonRow, last: JsonRow) -> str:
    """What two evaluations differ by, with the standard error that it has if they are independent: of the same prompts
    it is smaller.
    """
    rise = (last.get("eval/pass@1") or 0) - (first.get("eval/pass@1") or 0)
    errors = [error for row in (first, last) if (error := row.get("eval/stderr")) is not None]
    error = f" ± {math.hypot(*errors):.3f}" if len(errors) == 2 else ""
    return f"from {accuracy(first)}: {rise:+.3f}{error}"


def accuracy(row: JsonRow) -> str:
    """Held-out accuracy of an evaluation, as "0.512 ± 0.020"; of one prompt the standard error is not known."""
    mean, error = row.get("eval/pass@1") or 0, row.get("eval/stderr")
    return f"{mean:.3f}" + ("" if error is None else f" ± {error:.3f}")


def when(row: JsonRow) -> str:
    """The step after which an evaluation was made."""
    return f"after step {row['step']}" if row["step"] else "before the first step"


def seconds_text(seconds: float) -> str:
    """Seconds as "0.133 s", "12.3 s", "2 min 5 s" or "2 h 1 min": to 3 digits, as ratios of them are shown."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
