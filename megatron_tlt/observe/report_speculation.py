"""The charts of a run's speculation: accepted lengths and strategies. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, zip_longest
from typing import Any

from megatron_tlt.observe import colours
from megatron_tlt.observe.page import Chart, PageSection, Trace, bar
from megatron_tlt.observe.report_charts import labelled, metric_chart
from megatron_tlt.observe.rollouts import column_sums
from megatron_tlt.observe.runfiles import JsonRow, RunData, has_fields

PERCENT: dict[str, Any] = {"tickformat": ".0%", "range": [0, 1]}


def speculation(runs: Sequence[RunData]) -> PageSection:
    """Acceptance of drafted tokens; of a single run, also the strategies that drafted them."""
    note = "Tokens that a request gains in a speculative step, the policy's own token included: 1 is no gain."
    metrics = {"spec/accept_length": "accepted length"}
    parts = metric_chart(runs, "Accepted length by step", "tokens", metrics, note)
    found = [
        (label, rows, colours.CYCLE[at])
        for at, (run, label, _) in enumerate(labelled(runs))
        if (rows := _speculative(run))
    ]
    if not found:
        return PageSection("Speculation", parts)
    note = (
        "Of the drafts that reach a position, the share accepted up to and including it. Hover: tokens of a step whose "
        "drafts end there; an engine with this fixed draft length reaches at least as many."
    )
    layout: dict[str, Any] = {"yaxis": PERCENT, "hovermode": "closest"}
    bars = [_position_bars(*of_run) for of_run in found]
    parts.append(Chart("Accepted by draft position", bars, "draft position", "share", note, layout=layout))
    layout = {"xaxis": {"type": "category"}, "hovermode": "closest"}
    bars = [_batch_bars(*of_run) for of_run in found]
    title, axis = "Accepted length by batch size", "running requests of a rank"
    parts.append(Chart(title, bars, axis, "tokens", layout=layout))
    if len(runs) == 1:
        parts.append(_strategies(found[0][1]))
    return PageSection("Speculation", parts)


def _speculative(run: RunData) -> list[JsonRow]:
    fields = {"strategies": dict, "drafted_at": list, "accepted_at": list, "by_batch": dict}
    return [row for row in run.rollouts if has_fields(row, fields)]


def _position_bars(label: str, rows: Sequence[JsonRow], colour: str) -> Trace:
    """For each draft position, from 1: the share of drafts accepted up to it, and the mean tokens of a step up to it.

    A draft that ended before a position counts in the mean as one that was not accepted there.
    """
    drafted, accepted = (column_sums([row[key] for row in rows]) for key in ("drafted_at", "accepted_at"))
    shares = [a / d if d else None for a, d in zip_longest(accepted, drafted, fillvalue=0)]
    tokens = [1 + total / max(1, drafted[0]) for total in accumulate(accepted)] if drafted else []
    hover = "position %{x}: %{y:.1%} of %{customdata[0]} drafts; %{customdata[1]:.2f} tokens a step"
    facts = list(zip_longest(drafted, tokens))
    positions = range(1, len(drafted) + 1)
    return bar(f"accepted{label}", positions, shares, colour, customdata=facts, hovertemplate=hover)


def _batch_bars(label: str, rows: Sequence[JsonRow], colour: str) -> Trace:
    sizes = sorted({int(size) for row in rows for size in row["by_batch"]})
    sums = {size: column_sums([row["by_batch"].get(str(size), [0, 0]) for row in rows]) for size in sizes}
    sums = {size: both for size, both in sums.items() if both[0]}
    labels = [str(size) if size <= 2 else f"{size // 2 + 1}–{size}" for size in sums]
    counts = [count for count, _ in sums.values()]
    lengths = [emitted / count for count, emitted in sums.values()]
    hover = "%{x} running: %{y:.2f} tokens (mean of %{customdata} drafts)"
    return bar(f"accepted length{label}", labels, lengths, colour, customdata=counts, hovertemplate=hover)


def _strategies(rows: Sequence[JsonRow]) -> Chart:
    """Share of decoding steps by strategy: plain ones, then the most used."""
    counts = sum((Counter(row["strategies"]) for row in rows), Counter[str]())
    steps = [row["step"] for row in rows]
    totals = [sum(row["strategies"].values()) for row in rows]
    bars = []
    for at, name in enumerate(sorted(counts, key=lambda name: (name != "none", -counts[name]))):
        label, colour = (
            ("plain", colours.GREY) if name == "none" else (name, colours.CYCLE[at % len(colours.CYCLE)])
        )
        shares = [row["strategies"].get(name, 0) / n for row, n in zip(rows, totals, strict=True)]
        bars.append(bar(label, steps, shares, colour))
    note = "Share of the decoding steps. Names: the drafter and its draft length."
    layout = {"barmode": "stack", "yaxis": PERCENT}
    return Chart("Strategies", bars, "step", "share of steps", note, layout=layout)
