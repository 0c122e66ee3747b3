"""The charts of a run's speculation: accepted lengths and strategies. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from megatron_tlt.observe.page import Chart, Part, Section, Trace, bar
from megatron_tlt.observe.report_charts import metric_chart, stacked_chart
from megatron_tlt.observe.rollouts import column_sums
from megatron_tlt.observe.runfiles import Row, RunData

PERCENT: dict[str, Any] = {"tickformat": ".0%", "range": [0, 1]}
_SHOWN_STRATEGIES = 7  # the most used ones; the others are one


def speculation(run: RunData) -> Section:
    """How many drafted tokens were accepted, and by which strategies they were drafted."""
    metrics = [("spec/accept_length", "accepted length", "@1")]
    note = "Tokens that a request emits in a speculative step, its own next token included: 1 is no gain."
    parts = metric_chart(run, "Accepted length by step", "tokens", metrics, note)
    rows = [row for row in run.rollouts if row.get("strategies")]
    if rows:
        parts += _chart_of_spans(
            rows,
            _position_bars,
            "Accepted by draft position",
            x="draft position",
            y="share",
            note="Of the drafts that reach a position, those that are right up to and with it.",
            layout={"yaxis": PERCENT, "hovermode": "closest"},
        )
        parts += _chart_of_spans(
            rows,
            _batch_bars,
            "Accepted length by batch size",
            x="running requests of a rank",
            y="tokens",
            layout={"xaxis": {"type": "category"}, "hovermode": "closest"},
        )
        parts.append(_strategies(rows))
    return Section("Speculation", parts)


def _chart_of_spans(
    rows: Sequence[Row], bars_of: Callable[[Sequence[Row]], Trace], title: str, **more: Any
) -> list[Part]:
    """Bars of all steps, and of the first and the last quarter of a run that is long enough, to choose from."""
    spans: dict[str, Sequence[Row]] = {"all steps": rows}
    if len(rows) >= 4:
        for part in (rows[: len(rows) // 4], rows[-(len(rows) // 4) :]):
            spans[f"steps {part[0]['step']} to {part[-1]['step']}"] = part
    choices = {name: [bars] for name, span in spans.items() if (bars := bars_of(span))["x"]}
    return [Chart(title, choices=choices, choice_label="of", **more)] if choices else []


def acceptance_by_position(rows: Sequence[Row]) -> tuple[list[float | None], list[int]]:
    """For each draft position, from 1: the share of drafts accepted up to it, and the number of drafts."""
    drafted, accepted = (column_sums([row[key] for row in rows]) for key in ("drafted_at", "accepted_at"))
    accepted += [0] * (len(drafted) - len(accepted))
    return [a / d if d else None for a, d in zip(accepted, drafted, strict=False)], drafted


def _position_bars(rows: Sequence[Row]) -> Trace:
    shares, drafted = acceptance_by_position(rows)
    hover = "position %{x}: %{y:.1%} of %{customdata} drafts<extra></extra>"
    positions = range(1, len(drafted) + 1)
    return bar("accepted", positions, shares, "@1", customdata=drafted, hovertemplate=hover)


def _batch_bars(rows: Sequence[Row]) -> Trace:
    sizes = sorted({int(size) for row in rows for size in row["by_batch"]})
    sums = {size: column_sums([row["by_batch"].get(str(size), [0, 0]) for row in rows]) for size in sizes}
    sums = {size: both for size, both in sums.items() if both[0]}
    labels = [str(size) if size <= 2 else f"{size // 2 + 1}–{size}" for size in sums]
    lengths, counts = [emitted / steps for steps, emitted in sums.values()], [n for n, _ in sums.values()]
    hover = "%{x} running: %{y:.2f} tokens (%{customdata} row steps)<extra></extra>"
    return bar("accepted length", labels, lengths, "@3", customdata=counts, hovertemplate=hover)


def _strategies(rows: Sequence[Row]) -> Chart:
    """Share of decoding steps by strategy; the rarest are one."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(row["strategies"])
    drafting = [name for name, _ in counts.most_common() if name != "none"]
    shown = [*(["none"] if "none" in counts else []), *drafting[:_SHOWN_STRATEGIES]]
    totals = [sum(row["strategies"].values()) for row in rows]
    bars = {}
    for at, name in enumerate(shown):
        label, colour = ("plain", "@idle") if name == "none" else (name, f"@{at % 8 + 1}")
        values = [row["strategies"].get(name, 0) / n for row, n in zip(rows, totals, strict=True)]
        bars[label, colour] = values
    if len(drafting) > _SHOWN_STRATEGIES:
        bars["others", f"@{len(shown) % 8 + 1}"] = [
            1 - sum(shares) for shares in zip(*bars.values(), strict=True)
        ]
    return stacked_chart(
        "Strategies",
        "share of steps",
        [row["step"] for row in rows],
        bars,
        note="Of steps that only decode. Names: drafter_length_siblings_tokens to verify (0: all that were drafted).",
        layout={"bargap": 0.1, "yaxis": PERCENT},
    )
