"""`megatron-tlt report A B`: two runs as text. Same responses? How much faster, and where? Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest

from megatron_tlt.errors import aligned, shortened
from megatron_tlt.observe.report import cut_value, settings, state_of, subtitle
from megatron_tlt.observe.report_charts import phases_of
from megatron_tlt.observe.runfiles import JsonRow, RunData, require_metrics
from megatron_tlt.observe.summary import accuracy, seconds_text, when

Pair = tuple[RunData, RunData]

_EQUAL = 0.02  # relative difference of step times up to which they are called equal
_UNEQUAL_MACHINES = 1.25  # ratio of the times of the same update from which the machines were not comparable
_SHORTEST = 1e-3  # seconds a step from which a phase has a ratio


def equality(a: Sequence[JsonRow], b: Sequence[JsonRow]) -> tuple[bool, str]:
    """Compares the digests of rows of rollouts.jsonl: whether they are known to be equal, and a sentence."""
    common = len({row["step"] for row in a} & {row["step"] for row in b})
    if not common:
        return False, "The runs share no step with a digest, so it is not known whether their responses are the same."
    steps = f"all {common} common steps" if common > 1 else "the common step"
    if at := _differing(a, b, "responses"):
        return False, f"Not the same responses: they differ from step {min(at)} on (of {steps})."
    if at := _differing(a, b, "rewards"):
        return False, f"Same responses in {steps}, but other rewards from step {min(at)} on."
    return True, f"Same responses and rewards in {steps}."


def _differing(a: Sequence[JsonRow], b: Sequence[JsonRow], name: str) -> list[int]:
    """The common steps that have another digest of that name."""
    first = {row["step"]: row.get(name) for row in a}
    return [row["step"] for row in b if row["step"] in first and row.get(name) != first[row["step"]]]


def comparison(a: RunData, b: RunData) -> str:
    """The report of two runs. Raises ConfigError where none of the metrics of one can be read."""
    require_metrics(a)
    require_metrics(b)
    is_same, said = equality(a.rollouts, b.rollouts)
    # Times of the steps that both have made: later steps are often slower.
    common = {row["step"] for row in a.steps} & {row["step"] for row in b.steps}
    shared = common & {row["step"] for row in a.whole_steps} & {row["step"] for row in b.whole_steps}
    one, two = (replace(run, steps=[row for row in run.steps if row["step"] in shared]) for run in (a, b))
    names = (a.name, b.name) if a.name != b.name else (str(a.run_dir), str(b.run_dir))
    is_other_work = bool(_differing(a.rollouts, b.rollouts, "responses"))
    others = [name for name in ("model", "data", "env") if a.config.get(name) != b.config.get(name)]
    if is_other_work and others:
        speed = f"They differ in {' and '.join(others)}, so their speeds are not compared."
    else:
        speed = (_speed_by_tokens if is_other_work else _speed)((one, two), names)
    caution = _caution((one, two)) if is_same else ""
    parts = [f"{said} {speed}{caution}{_left_out(common - shared)}", f"A: {subtitle(a)}\nB: {subtitle(b)}"]
    tables: dict[str, list[tuple[str, ...]]] = {
        "Settings that differ:": [("field", *names), *_differences(a, b)],
        f"Seconds a step, of {len(shared)} steps:": [("phase", *names, "B - A", "A / B"), *_times((one, two))],
        "Results:": [("", *names), *_results(a, b, (one, two))],
    }
    parts += ["\n".join([title, *aligned(rows)]) for title, rows in tables.items() if len(rows) > 1]
    return "\n\n".join(parts)


def phase_rows(runs: Pair) -> list[tuple[str, float, float]]:
    """(phase, seconds a step in A, in B), the largest difference first; both of the same steps."""
    first, second = (phases_of(run) for run in runs)
    steps = max(1, len(runs[0].steps))
    rows = [(name, sum(first.get(name, [])) / steps, sum(second.get(name, [])) / steps) for name in first | second]
    return sorted(rows, key=lambda row: -abs(row[1] - row[2]))


def _speed(runs: Pair, names: tuple[str, str]) -> str:
    """How much faster, and where? Of runs cut to common steps."""
    a, b = (run.mean("time/step") for run in runs)
    if not a or not b:
        return "Nothing is known of their speed: they share no step that generated all of its responses."
    each = f"{seconds_text(a)} against {seconds_text(b)} a step"
    if abs(a / b - 1) <= _EQUAL:
        return f"They are equally fast: {each}."
    gains = [row for row in phase_rows(runs) if (row[1] > row[2]) == (a > b)]
    where = ""
    if gains:
        name, x, y = gains[0]
        where = f", most of it in {name}: {seconds_text(x)} against {seconds_text(y)}"
    return f"{_faster(a, b, names)} ({each}{where})."


def _speed_by_tokens(runs: Pair, names: tuple[str, str]) -> str:
    """How much faster where the responses differ: their steps are other amounts of work."""
    tokens = [run.total("engine/generated_tokens") for run in runs]  # those of groups that are not trained on, too
    if not all(tokens):
        return "Their steps are other work, of which the tokens are not known."
    a, b = (1000 * run.total("time/step") / count for run, count in zip(runs, tokens, strict=True))
    each = f"{seconds_text(a)} against {seconds_text(b)} for 1,000 generated tokens"
    return f"So their steps are other work: {_faster(a, b, names)} by {each}."


def _faster(a: float, b: float, names: tuple[str, str]) -> str:
    return f"{names[1] if a > b else names[0]} is {max(a / b, b / a):.2f}× as fast"


def _caution(runs: Pair) -> str:
    """A sentence where times do not compare: the update of the same responses on as many ranks took longer."""
    a, b = runs
    low, high = sorted(run.mean("time/update") for run in runs)
    is_same_work = a.num_ranks == b.num_ranks and a.config.get("actor") == b.config.get("actor")
    if not is_same_work or not low or high < _UNEQUAL_MACHINES * low:
        return ""
    return (
        f" But the update, the same work in both, took {high / low:.2f}× as long in one of them: the machines were not "
        "equally fast or not equally busy, so these times say little."
    )


def _left_out(steps: Collection[int]) -> str:
    """A sentence on the common steps of which nothing is compared but responses and rewards."""
    if not steps:
        return ""
    which = f"step{'s' * (len(steps) > 1)} {shortened(sorted(steps))}"
    return f" Left out of times and means: {which}, with responses that a restart read from the rollout cache."


def _differences(a: RunData, b: RunData) -> list[tuple[str, str, str]]:
    """(field, value in A, value in B) of the settings that differ, by name; last, the state of the runs."""
    first, second = dict(settings(a)), dict(settings(b))
    rows = []
    for path in sorted((first | second).keys() - {"train.run_dir"}):
        x, y = (of.get(path, "") for of in (first, second))
        if x != y:
            at = next(i for i, (c, d) in enumerate(zip_longest(x, y)) if c != d)  # behind what is cut, perhaps
            rows.append((path, cut_value(x, at), cut_value(y, at)))
    return [*rows, ("state", state_of(a), state_of(b))]


def _times(runs: Pair) -> Iterator[tuple[str, ...]]:
    rows = phase_rows(runs)
    if runs[0].steps:
        rows.append(("whole step", runs[0].mean("time/step"), runs[1].mean("time/step")))
    for name, x, y in rows:
        yield name, f"{x:.3f}", f"{y:.3f}", f"{y - x:+.3f}", f"{x / y:.2f}" if min(x, y) > _SHORTEST else ""


def _results(a: RunData, b: RunData, common: Pair) -> Iterator[tuple[str, ...]]:
    """The last evaluation after the same step, else the last of each run, and means over the `common` steps."""
    evals = [{row["step"]: row for row in run.evals} for run in (a, b)]
    if both := evals[0].keys() & evals[1].keys() - {0}:  # before the first step nothing is learned
        yield f"held-out accuracy, step {max(both)}", *(accuracy(of[max(both)]) for of in evals)
    elif any(evals):
        last = ("".join(f"{accuracy(row)} {when(row)}" for row in run.evals[-1:]) for run in (a, b))
        yield "held-out accuracy, last", *last
    names = ("reward/mean", "reward/accuracy", "reward/failures", "length/mean", "spec/accept_length")
    for name in (*names, "drafter/accept/1_mean", "idle/seconds"):
        if any(run.column(name)[1] for run in common):
            yield f"{name}, mean of steps", *(f"{run.mean(name):.3f}" if run.column(name)[1] else "" for run in common)
