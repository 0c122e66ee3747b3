"""A simulation as text for a terminal. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_tlt.sim.result import PHASES, Point, SimResult
from megatron_tlt.sim.verdict import nodes_text, verdict

_BLOCKS = "▁▂▃▄▅▆▇█"


def render(result: SimResult) -> str:
    """The verdict, step time by phase, comparison, idle time, curve, decisions, recommended thresholds, assumptions."""
    parts = [result.name, verdict(result), _points(result), _curves(result.points)]
    parts += [_strategies(result.points), _thresholds(result)]
    parts.append("assumed:\n" + "\n".join(f"  - {text}" for text in result.assumptions))
    notes = sorted({f"{nodes_text(p.nodes)}: {p.note}" for p in result.points if p.note})
    if notes:
        parts.append("\n".join(notes))
    return "\n\n".join(part for part in parts if part)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells under each other, numbers to the right; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _points(result: SimResult) -> str:
    """A line a point."""
    used = [name for name in PHASES if any(p.phases[name] >= 0.005 * p.seconds for p in result.points)]
    speedup = {(c.nodes, c.mode): c for c in result.comparisons}
    heading = [
        "nodes GPUs mode",
        "step s",
        *used,
        "tokens/s",
        "rollout x",
        "e2e x",
        "idle GPU-h",
        "recovered",
    ]
    rows = [[*heading, "GPU-h/100 steps"]]
    for p in result.points:
        found = speedup.get((p.nodes, p.mode))
        idle = 100 / len(p.steps)
        rows.append(
            [
                f"{p.nodes:5d} {p.gpus:4d} {p.mode}",
                _seconds(p.seconds),
                *(_seconds(p.phases[name]) for name in used),
                f"{p.tokens_per_second:,.0f}",
                f"{found.rollout:.2f}" if found else "-",
                f"{found.e2e:.2f}" if found else "-",
                f"{p.idle_gpu_hours * idle:.3g}",
                f"{p.recovered_gpu_hours * idle:.3g}",
                f"{p.gpu_hours * idle:.4g}",
            ]
        )
    return columns(rows) + "\n(idle and recovered GPU-hours are those of 100 steps, too)"


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value >= 100 else f"{value:.3g}"


def _curves(points: Sequence[Point]) -> str:
    """The running-requests curve of each point's last step, as a line of blocks."""
    lines = ["running requests over the rollout of the last step (| where most replicas speculate):"]
    width = 48
    longest = max((p.shown.running[-1][0] for p in points), default=0.0)
    for p in points:
        top, end = max(n for _, n in p.shown.running), p.shown.running[-1][0]
        cells = []
        for i in range(max(1, round(width * end / max(longest, 1e-12)))):
            at = longest * i / width
            running = [n for t, n in p.shown.running if t <= at][-1]
            cells.append(_BLOCKS[min(7, 8 * running // max(1, top + 1))] if running else " ")
        start = p.shown.speculation_from
        if start is not None and longest:
            cells.insert(min(len(cells), round(width * start / longest)), "|")
        lines.append(f"{p.nodes:5d} {p.mode:7s} {''.join(cells)}  {top} requests, {_seconds(end)} s")
    return "\n".join(lines)


def _strategies(points: Sequence[Point]) -> str:
    """What the selector does, of the last point that speculates."""
    last = [p for p in points if any(s.accept_length for s in p.strategies)]
    if not last:
        return ""
    rows = [["running requests", "tokens/s", "plain", "x", "tokens a draft step", "played most"]]
    for s in last[-1].strategies:
        name = max(s.shares, key=lambda k: s.shares[k])
        gain = s.tokens_per_second / s.plain_tokens_per_second
        rows.append(
            [
                str(s.running),
                f"{s.tokens_per_second:,.0f}",
                f"{s.plain_tokens_per_second:,.0f}",
                f"{gain:.2f}",
                f"{s.accept_length:.2f}" if s.accept_length else "-",
                f"{name} ({s.shares[name]:.0%})",
            ]
        )
    return f"one replica, mode {last[-1].mode}:\n" + columns(rows)


def _thresholds(result: SimResult) -> str:
    if not result.thresholds:
        return ""
    lines = [f"  {t.setting}: {t.value}  ({t.reason})" for t in result.thresholds]
    return "recommended:\n" + "\n".join(lines)
