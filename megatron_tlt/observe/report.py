"""`megatron-tlt report RUN_DIR`: a run as one page, finished or in progress. Torch-free."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence

from megatron_tlt.config.data import is_of_unknown_scale
from megatron_tlt.observe.equal_rewards import equal_rewards_warning
from megatron_tlt.observe.page import Page, PageSection, Samples, Table
from megatron_tlt.observe.report_charts import charts_of
from megatron_tlt.observe.runfiles import JsonRow, RunData, require_metrics
from megatron_tlt.observe.summary import accuracy, figures, when

_VALUE_CHARACTERS = 90  # of a setting
_TEXT_CHARACTERS = 6000  # of a prompt or a response
_REFUSED_CHARACTERS = 200  # of one refused draft
_SAMPLES = 60
_SAMPLE_STEPS = 12


def run_page(run: RunData) -> Page:
    """The report of one run. Raises ConfigError where none of its metrics can be read."""
    require_metrics(run)
    page = Page(f"Run {run.name}", subtitle(run), stats=[*figures(run)])
    if not run.steps:
        before = "".join(f" Evaluated {when(row)}: {accuracy(row)}." for row in run.evals[:1])
        page.headline = f"No step is done yet: charts appear with the first one.{before}"
    samples = _sample_rows(run)
    page.sections = [
        PageSection("Charts", charts_of(run)),
        _samples(run, samples),
        PageSection("Settings", [Table(["field", "value"], [(f, cut_value(v)) for f, v in settings(run)], wide=True)]),
    ]
    last = [row for row in samples[:1] if row["step"] == run.last_step]
    equal = equal_rewards_warning(run.steps, run.config.get("algorithm", {}).get("name", ""), last)
    page.warnings = [*run.reasons, *run.warnings, *([] if equal is None else [equal])]
    now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    page.footer = f"{run.run_dir.resolve()} · written {now} by megatron-tlt report"
    return page


def state_of(run: RunData) -> str:
    """ "finished", or the run's condition and how many steps are done."""
    if run.is_finished:
        return f"finished, {run.last_step} steps"
    of = f" of {run.num_steps}" if run.num_steps else ""
    return f"{run.condition or 'in progress or stopped'}, {run.last_step}{of} steps"


def subtitle(run: RunData) -> str:
    """Model, algorithm, ranks and state in a line."""
    model = str(run.config.get("model", {}).get("path", "")).rstrip("/").rpartition("/")[2]
    algorithm = str(run.config.get("algorithm", {}).get("name", ""))
    ranks = f"{run.num_ranks} rank{'s' * (run.num_ranks != 1)}"
    return " · ".join(part for part in (model, algorithm, ranks, state_of(run)) if part)


def settings(run: RunData) -> Iterator[tuple[str, str]]:
    """(path of a field, its whole value) of the configuration; the items of a list are fields 0, 1, ..."""
    return _fields(run.config, "")


def _fields(value: object, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, list) and value:
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _fields(inner, f"{path}.{key}".lstrip("."))
    else:
        yield path, "null" if value is None else str(value)


def cut_value(text: str, at: int = 0) -> str:
    """As much of a setting's value as is shown; the character `at` is in it."""
    begin = max(0, at - 2 * _VALUE_CHARACTERS // 3)
    end = begin + _VALUE_CHARACTERS
    return f"{'… ' if begin else ''}{text[begin:end]}{' …' if end < len(text) else ''}"


def _sample_rows(run: RunData) -> list[JsonRow]:
    """Samples of steps at equal distances, the last one first; of each step as many, in whole pairs."""
    every = [row["step"] for row in reversed(run.steps)]
    steps = every[:: len(every) // _SAMPLE_STEPS + 1]
    most = _SAMPLES // max(1, len(steps)) // 2 * 2
    found: dict[int, list[JsonRow]] = {step: [] for step in steps}
    for row in run.samples(steps):
        if len(found[row["step"]]) < most:
            found[row["step"]].append(row)
    return [row for of_step in found.values() for row in reversed(of_step)]


def _samples(run: RunData, samples: Sequence[JsonRow]) -> PageSection:
    """The section of the rows of `_sample_rows`."""
    functions = run.config.get("rewards", {}).get("functions")
    rows = [row | _shown(row, functions != []) | {"verdict": _verdict(row, functions)} for row in samples]
    text = "The best and the worst response of the first prompts of a step: the update learns from their contrast."
    if functions == []:
        text = "Responses to the first prompts of a step. No reward function judges them."
    elif _is_scale_unknown(functions):
        text += " Below 1: rewards.functions.N.threshold, from which a response is correct, has its default."
    title = "Samples"
    if any("turns" in row for row in rows):
        title, text = "Trajectories", f"{text} By turn: what the model wrote, then the environment's text."
    return PageSection(title, [Samples(rows)] if rows else [], text)


def _verdict(row: JsonRow, functions: Sequence[JsonRow] | None) -> str:
    """Of the run's reward functions on a response; None: its configuration cannot be read."""
    if functions == [] or row.get("failure"):
        return "not judged"
    if row["correct"]:
        return "correct"
    return "below 1" if _is_scale_unknown(functions) else "wrong"


def _is_scale_unknown(functions: Sequence[JsonRow] | None) -> bool:
    """Whether a response below the thresholds may be right: one of them is the default, of a user's function."""
    return any(is_of_unknown_scale(f.get("name"), f.get("threshold")) for f in functions or ())


def _shown(row: JsonRow, has_reward: bool) -> JsonRow:
    """Facts in a line, the prompt, and the response in parts: (facts of a turn, its stretches)."""
    facts = [f"step {row['step']}"]
    facts += [f"reward {row.get('reward') or 0:g}"] if has_reward else []
    facts.append(f"{row.get('tokens', 0)} tokens")
    facts += [str(row[name]) for name in ("task", "finish_reason") if row.get(name)]
    if turns := row.get("turn_rewards"):
        facts.append(f"{len(turns)} turns, rewards {', '.join(f'{reward:g}' for reward in turns)}")
    if row.get("env_failure"):
        facts.append(f"aborted: {row['env_failure']}")
    elif row.get("failure"):
        facts.append(f"reward failed: {row['failure']}")
    parts = [("", [("", _cut(row["response"]))])]
    if drafts := row.get("drafts"):
        accepted = sum(count for _, count, _ in drafts["runs"])
        since, end = drafts.get("since", 0), len(drafts["pieces"])
        tokens = f"tokens {since + 1} to {end}" if since else f"the first {end} tokens"
        facts.append(f"{accepted} of {tokens} were drafted")
        shown = [*stretches(drafts["pieces"], drafts["runs"], row.get("given", ()))]
        shown += [("", f" … ({row['tokens']} tokens)")] if end < row.get("tokens", 0) else []
        parts = [("", shown)]
    if row.get("turns"):
        parts = list(_turns(row))
    return {"facts": " · ".join(facts), "prompt": _cut(row["prompt"]), "parts": parts}


def _turns(row: JsonRow) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The facts and the stretches of each turn of a trajectory, with drafts where all of the turn has them."""
    drafts = row.get("drafts") or {"pieces": [], "runs": []}
    ends = [*row["given"], [row["tokens"], row["tokens"]]]
    start = 0
    for number, (turn, (end, following)) in enumerate(zip(row["turns"], ends, strict=True), 1):
        facts = [f"turn {number}"]
        for call in turn.get("calls", ()):
            facts.append(f"calls {call['name']} {json.dumps(call['arguments'], ensure_ascii=False)}" if "name" in call
                         else f"a call that cannot be made: {call['problem']}")  # fmt: skip
        facts += [f"reward {turn['reward']:g}"] if turn.get("reward") is not None else []
        facts += [f"waited {turn['seconds']:.2f} s for the environment"] if "seconds" in turn else []
        shown = [("", _cut(turn["response"])), ("given", _cut(turn.get("observation", "")))]
        if following <= len(drafts["pieces"]):
            runs = [(at - start, count, refused) for at, count, refused in drafts["runs"] if start <= at < following]
            shown = list(stretches(drafts["pieces"][start:following], runs, [(end - start, following - start)]))
        yield " · ".join(facts), shown
        start = following


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT_CHARACTERS else f"{text[:_TEXT_CHARACTERS]} … ({len(text)} characters)"


def stretches(
    pieces: Sequence[str], runs: Iterable[tuple[int, int, str]], given: Iterable[tuple[int, int]] = ()
) -> Iterator[tuple[str, str]]:
    """(CSS class, text) of a response; `pieces`, `runs` and `given` as in samples.jsonl (see `observe.rollouts`)."""
    marks = [(start, start + accepted, "accepted", refused) for start, accepted, refused in runs]
    marks += [(start, end, "given", "") for start, end in given]
    at = 0
    for start, end, kind, refused in sorted(marks):
        yield "", "".join(pieces[at:start])
        at = end
        if end > start:
            yield kind, "".join(pieces[start:end])
        if refused:
            yield "refused", refused[:_REFUSED_CHARACTERS]
    yield "", "".join(pieces[at:])
