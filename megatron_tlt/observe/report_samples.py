"""Sample rollouts as a person reads them, drafted tokens marked. Torch-free."""

from __future__ import annotations

import html
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from megatron_tlt.observe.page import Markup, Section
from megatron_tlt.observe.runfiles import Row, RunData

_MOST = 60  # samples in a report
_LONGEST = 6000  # characters of a prompt or an answer without marks
_REFUSED = 200  # characters of one refused draft


def samples(run: RunData) -> Section:
    """Answers of the first and the last steps, and of some between."""
    rows = _chosen(run.samples)
    if not rows:
        return Section("Samples")
    steps = sorted({row["step"] for row in rows})
    options = "".join(
        f'<option value="{step}"{" selected" if step == steps[-1] else ""}>{step}</option>' for step in steps
    )
    has_drafts = any("drafts" in row for row in rows)
    key = (
        '<span class=key><span><span class="ok first">drafted</span> and accepted</span>'
        "<span>plain: drawn by the policy itself</span>"
        "<span><span class=refused>drafted</span> and refused</span></span>"
        if has_drafts
        else ""
    )
    bar = (
        "<div class=samples-bar data-samples>"
        f"<label>step <select><option value=''>all</option>{options}</select></label>"
        "<label>verdict <select><option value=''>all</option><option value=yes>correct</option>"
        "<option value=no>wrong</option></select></label>"
        f"<button type=button aria-pressed=false{'' if has_drafts else ' hidden'}>show refused drafts</button>"
        f"{key}</div>"
    )
    body = "".join(_sample(row) for row in reversed(rows))
    none = '<p class=note id="sample-none" hidden>No sample of this kind was written.</p>'
    markup = Markup(f'{bar}<div id="sample-list" class="hide-refused">{body}</div>{none}')
    text = "The best and the worst answer of the first prompts of a step, as the update learns from their contrast."
    return Section("Samples", [markup], text)


def _chosen(rows: Sequence[Row]) -> list[Row]:
    """Whole steps, evenly over the run, the last one included."""
    by_step = [list(group) for _, group in groupby(rows, key=lambda row: row["step"])]
    if len(rows) <= _MOST:
        return list(rows)
    most = max(1, _MOST * len(by_step) // len(rows))
    picked = sorted(
        {round(i * (len(by_step) - 1) / max(1, most - 1)) for i in range(most)} | {len(by_step) - 1}
    )
    return [row for at in picked for row in by_step[at][:_MOST]]


def _sample(row: Row) -> str:
    correct = bool(row.get("correct"))
    tag = f'<span class="tag {"yes" if correct else "no"}">{"correct" if correct else "wrong"}</span>'
    facts = [f"step {row['step']}", f"reward {row.get('reward', 0):g}", f"{row.get('tokens', 0)} tokens"]
    facts += [str(row[name]) for name in ("task", "finish_reason") if row.get(name)]
    drafts = row.get("drafts")
    answer = row.get("response") or ""
    shown = marked(drafts) if drafts else html.escape(_cut(answer))
    if drafts:
        accepted = sum(ok for _, ok, _ in drafts["runs"])
        facts.append(f"{accepted} of the first {len(drafts['pieces'])} tokens were drafted")
    wanted = f"<br>wanted: {html.escape(str(row['answer']))}" if row.get("answer") not in (None, "") else ""
    return (
        f'<article class=sample data-step="{row["step"]}" data-verdict="{"yes" if correct else "no"}">'
        f"<header>{tag} {html.escape(' · '.join(facts))}{wanted}</header>"
        f"<pre class=prompt>{html.escape(_cut(row.get('prompt') or ''))}</pre><pre>{shown}</pre></article>"
    )


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} … ({len(text)} characters)"


def marked(drafts: dict[str, Any]) -> str:
    """The tokens as HTML; `drafts` as `observe.samples` writes it."""
    pieces: list[str] = drafts["pieces"]
    out: list[str] = []
    at = 0
    for start, accepted, refused in drafts["runs"]:
        out.append(html.escape("".join(pieces[at:start])))
        at = start + accepted
        if accepted:
            out.append(f'<span class="ok first">{html.escape("".join(pieces[start:at]))}</span>')
        if refused:
            out.append(f"<span class=refused>{html.escape(refused[:_REFUSED])}</span>")
    out.append(html.escape("".join(pieces[at:])))
    return "".join(out)
