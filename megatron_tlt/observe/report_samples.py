"""Sample rollouts as text, drafted tokens marked. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from megatron_tlt.observe.page import Samples, Section
from megatron_tlt.observe.runfiles import Row, RunData

_MOST = 60  # samples in a report
_LONGEST = 6000  # characters of a prompt or of a response without marks
_REFUSED = 200  # characters of one refused draft


def samples(run: RunData) -> Section:
    """Responses of the first and the last steps, and of some between."""
    rows = [row | _shown(row) for row in reversed(_chosen(run.samples))]
    text = (
        "The best and the worst response of the first prompts of a step: the update learns from their contrast."
    )
    return Section("Samples", [Samples(rows, _LONGEST)] if rows else [], text)


def _chosen(rows: Sequence[Row]) -> list[Row]:
    """Whole steps, evenly over the run, the first and the last one included."""
    by_step: list[list[Row]] = [list(group) for _, group in groupby(rows, key=lambda row: row["step"])]
    if len(rows) > _MOST:
        most, last = max(2, _MOST * len(by_step) // len(rows)), len(by_step) - 1
        by_step = [by_step[at] for at in sorted({round(i * last / (most - 1)) for i in range(most)})]
    return [row for group in by_step for row in group[:_MOST]]


def _shown(row: Row) -> Row:
    """Facts in a line, and the response in stretches."""
    facts = [f"step {row['step']}", f"reward {row.get('reward') or 0:g}", f"{row.get('tokens', 0)} tokens"]
    facts += [str(row[name]) for name in ("task", "finish_reason") if row.get(name)]
    shown = [("", row.get("response") or "")]
    if drafts := row.get("drafts"):
        accepted = sum(count for _, count, _ in drafts["runs"])
        facts.append(f"{accepted} of the first {len(drafts['pieces'])} tokens were drafted")
        shown = list(stretches(drafts["pieces"], drafts["runs"]))
    return {"facts": " · ".join(facts), "stretches": shown}


def stretches(pieces: Sequence[str], runs: Iterable[tuple[int, int, str]]) -> Iterator[tuple[str, str]]:
    """(CSS class, text) of a response; `pieces` and `runs` as in samples.jsonl (see `observe.rollouts`)."""
    at = 0
    for start, accepted, refused in runs:
        yield "", "".join(pieces[at:start])
        at = start + accepted
        if accepted:
            yield "ok first", "".join(pieces[start:at])
        if refused:
            yield "refused", refused[:_REFUSED]
    yield "", "".join(pieces[at:])
