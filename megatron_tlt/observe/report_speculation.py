"""The charts of a run's speculation: accepted lengths and strategies. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron_tlt.observe.page import Chart, Part, Section, Trace
from megatron_tlt.observe.report_charts import grouped, line
from megatron_tlt.observe.runfiles import Row, RunData


def speculation(run: RunData) -> Section:
    """What drafts did."""
    rows = [row for row in run.rollouts if row.get("strategies")]
    parts: list[Part] = []
    length = run.column("spec/accept_length")
    if length[0]:
        trace = line("accepted length", *length, "@1", showlegend=False)
        note = "Tokens that a request emits in a speculative step, its own next token included: 1 is no gain."
        parts.append(Chart("Accepted length by step", [trace], "step", "tokens", note))
    if rows:
        parts += [*_by_position(rows), *_by_batch(rows), _shares(rows)]
    return Section("Speculation", parts)


def _spans(rows: Sequence[Row]) -> dict[str, Sequence[Row]]:
    """All steps together, and the beginning and end of the run, where it is long enough to differ."""
    spans: dict[str, Sequence[Row]] = {"all steps": rows}
    if len(rows) >= 4:
        part = max(1, len(rows) // 4)
        spans[f"steps {rows[0]['step']} to {rows[part - 1]['step']}"] = rows[:part]
        spans[f"steps {rows[-part]['step']} to {rows[-1]['step']}"] = rows[-part:]
    return spans


def _by_position(rows: Sequence[Row]) -> list[Part]:
    choices = {}
    for name, span in _spans(rows).items():
        drafted, accepted = (
            _column_sums([row[key] for row in span]) for key in ("drafted_at", "accepted_at")
        )
        accepted += [0] * (len(drafted) - len(accepted))
        shares = [a / d if d else None for a, d in zip(accepted, drafted, strict=False)]
        positions = list(range(1, len(drafted) + 1))
        bar: Trace = {
            "type": "bar",
            "x": positions,
            "y": shares,
            "marker": {"color": "@1"},
            "name": "accepted",
        }
        bar |= {"customdata": drafted, "showlegend": False}
        bar["hovertemplate"] = "position %{x}: %{y:.1%} of %{customdata} drafts<extra></extra>"
        if positions:
            choices[name] = [bar]
    if not choices:
        return []
    note = "Of the drafts that reach a position, those that are right up to and with it."
    layout = {"yaxis": {"tickformat": ".0%", "range": [0, 1]}, "hovermode": "closest"}
    title = "Accepted by draft position"
    return [Chart(title, [], "draft position", "share", note, choices, choice_label="of", layout=layout)]


def _by_batch(rows: Sequence[Row]) -> list[Part]:
    choices = {}
    for name, span in _spans(rows).items():
        sums: dict[int, list[int]] = {}
        for row in span:
            for bucket, (count, emitted) in row["by_batch"].items():
                total = sums.setdefault(int(bucket), [0, 0])
                total[0] += count
                total[1] += emitted
        buckets = [b for b in sorted(sums) if sums[b][0]]
        labels = [str(b) if b <= 2 else f"{b // 2 + 1}–{b}" for b in buckets]
        bar: Trace = {"type": "bar", "x": labels, "y": [sums[b][1] / sums[b][0] for b in buckets]}
        bar |= {"marker": {"color": "@3"}, "customdata": [sums[b][0] for b in buckets], "showlegend": False}
        bar["hovertemplate"] = "%{x} running: %{y:.2f} tokens (%{customdata} row steps)<extra></extra>"
        if buckets:
            choices[name] = [bar]
    if not choices:
        return []
    layout = {"xaxis": {"type": "category"}, "hovermode": "closest"}
    return [
        Chart(
            "Accepted length by batch size",
            [],
            "running requests of a rank",
            "tokens",
            choices=choices,
            choice_label="of",
            layout=layout,
        )
    ]


def _shares(rows: Sequence[Row]) -> Chart:
    """Share of decoding steps by strategy; the rarest are one."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(row["strategies"])
    names = [name for name, _ in counts.most_common(8) if name != "none"][:7]
    named = {**({"none": "plain"} if "none" in counts else {}), **{name: name for name in names}}
    if set(counts) - named.keys():
        named[""] = "others"
    steps = [row["step"] for row in rows]
    traces = []
    for at, (name, label) in enumerate(named.items()):
        values = []
        for row in rows:
            total = sum(row["strategies"].values())
            others = sum(n for s, n in row["strategies"].items() if s not in named)
            values.append((row["strategies"].get(name, 0) if name else others) / total)
        x, y = grouped(steps, values)
        colour = "@idle" if name == "none" else f"@{at % 8 + 1}"
        traces.append({"type": "bar", "name": label, "x": x, "y": y, "marker": {"color": colour}})
    note = "Of steps that only decode. Names: drafter_length_siblings_tokens to verify (0: all that were drafted)."
    layout = {"barmode": "stack", "bargap": 0.1, "yaxis": {"tickformat": ".0%", "range": [0, 1]}}
    layout["legend"] = {"traceorder": "normal"}
    return Chart("Strategies", traces, "step", "share of steps", note, layout=layout)


def _column_sums(lists: Sequence[Sequence[int]]) -> list[int]:
    total = [0] * max(map(len, lists), default=0)
    for values in lists:
        for at, value in enumerate(values):
            total[at] += value
    return total
