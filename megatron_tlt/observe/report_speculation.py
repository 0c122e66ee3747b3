"""The charts of a run's speculation: accepted lengths and strategies. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, zip_longest
from typing import Any

from megatron_tlt.observe.page import Chart, Section, Trace, bar
from megatron_tlt.observe.report_charts import labelled, metric_chart, stacked_chart
from megatron_tlt.observe.rollouts import column_sums
from megatron_tlt.observe.runfiles import Row, RunData, has_fields

PERCENT: dict[str, Any] = {"tickformat": ".0%", "range": [0, 1]}
_LAST_STEPS = 8  # whose drafter and policy are nearly those that are exported


def speculation(runs: Sequence[RunData]) -> Section:
    """How many drafted tokens were accepted; of a single run, also by which strategies they were drafted."""
    metrics = [("spec/accept_length", "accepted length", "@1")]
    note = "Tokens that a request emits in a speculative step, its own next token included: 1 is no gain."
    parts = metric_chart(runs, "Accepted length by step", "tokens", metrics, note)
    rows_of = [
        (label, rows, at) for at, (run, label, _) in enumerate(labelled(runs)) if (rows := _speculative(run))
    ]
    if rows_of:
        note = "Of the drafts that reach a position, those that are right up to and with it."
        bars = [_position_bars(*labelled_rows) for labelled_rows in rows_of]
        layout = {"yaxis": PERCENT, "hovermode": "closest"}
        parts.append(
            Chart("Accepted by draft position", bars, "draft position", "share", note, layout=layout)
        )
        note = (
            "Tokens that a request emits in a drafting step, by the number of drafted tokens, from the drafts of the "
            f"last {_LAST_STEPS} steps (of both drafters, where they are mixed). This run drafted fewer where it "
            "expected less: an engine that always drafts so many accepts at least that. Verification costs time: the "
            "speed-up is less."
        )
        bars = [_serving_bars(*labelled_rows) for labelled_rows in rows_of]
        layout = {"hovermode": "closest"}
        parts.append(Chart("Worth in serving", bars, "drafted tokens", "tokens", note, layout=layout))
        bars = [_batch_bars(*labelled_rows) for labelled_rows in rows_of]
        layout = {"xaxis": {"type": "category"}, "hovermode": "closest"}
        title, axis = "Accepted length by batch size", "running requests of a rank"
        parts.append(Chart(title, bars, axis, "tokens", layout=layout))
    if rows_of and len(runs) == 1:
        parts.append(_strategies(rows_of[0][1]))
    return Section("Speculation", parts)


def _speculative(run: RunData) -> list[Row]:
    fields = {"strategies": dict, "drafted_at": list, "accepted_at": list, "by_batch": dict}
    return [row for row in run.rollouts if has_fields(row, fields)]


def _position_bars(label: str, rows: Sequence[Row], at: int) -> Trace:
    """For each draft position, from 1: the share of drafts accepted up to it."""
    drafted, accepted = (column_sums([row[key] for row in rows]) for key in ("drafted_at", "accepted_at"))
    shares = [a / d if d else None for a, d in zip_longest(accepted, drafted, fillvalue=0)]
    hover = "position %{x}: %{y:.1%} of %{customdata} drafts"
    positions = range(1, len(drafted) + 1)
    return bar(f"accepted{label}", positions, shares, f"@{at + 1}", customdata=drafted, hovertemplate=hover)


def _serving_bars(label: str, rows: Sequence[Row], at: int) -> Trace:
    """Tokens of a drafting step up to each drafted length: its own, and for each position the share of all drafts that
    were accepted up to it. A draft that ended before a position counts as one that was not.
    """
    drafted, accepted = (
        column_sums([row[k] for row in rows[-_LAST_STEPS:]]) for k in ("drafted_at", "accepted_at")
    )
    lengths = [1 + total / drafted[0] for total in accumulate(accepted)] if drafted and drafted[0] else []
    hover = "%{x} drafted: %{y:.2f} tokens a step"
    return bar(f"tokens{label}", range(1, len(lengths) + 1), lengths, f"@{at + 1}", hovertemplate=hover)


def _batch_bars(label: str, rows: Sequence[Row], at: int) -> Trace:
    sizes = sorted({int(size) for row in rows for size in row["by_batch"]})
    sums = {size: column_sums([row["by_batch"].get(str(size), [0, 0]) for row in rows]) for size in sizes}
    sums = {size: both for size, both in sums.items() if both[0]}
    labels = [str(size) if size <= 2 else f"{size // 2 + 1}–{size}" for size in sums]
    lengths, counts = [emitted / steps for steps, emitted in sums.values()], [n for n, _ in sums.values()]
    hover = "%{x} running: %{y:.2f} tokens (%{customdata} row steps)"
    colour = f"@{at + 1}"
    return bar(f"accepted length{label}", labels, lengths, colour, customdata=counts, hovertemplate=hover)


def _strategies(rows: Sequence[Row]) -> Chart:
    """Share of decoding steps by strategy: plain ones, then the most used."""
    counts = sum((Counter(row["strategies"]) for row in rows), Counter[str]())
    totals = [sum(row["strategies"].values()) for row in rows]
    bars = {}
    for at, name in enumerate(sorted(counts, key=lambda name: (name != "none", -counts[name]))):
        label, colour = ("plain", "@idle") if name == "none" else (name, f"@{at % 8 + 1}")
        values = [row["strategies"].get(name, 0) / n for row, n in zip(rows, totals, strict=True)]
        bars[label, colour] = values
    return stacked_chart(
        "Strategies",
        "share of steps",
        [row["step"] for row in rows],
        bars,
        note="Of steps that only decode. Names: drafter_length_siblings_tokens to verify (0: all that were drafted).",
        layout={"bargap": 0.1, "yaxis": PERCENT},
    )
