"""A simulation as one self-contained HTML page: charts drawn as SVG, no script and no network. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from megatron_tlt.sim.result import PHASES, Point, SimResult
from megatron_tlt.sim.tables import render

_COLOURS = ("#3b6fb6", "#d1495b", "#edae49", "#66a182", "#7d5ba6", "#8d99ae", "#2e4057", "#c6c6c6")
_STYLE = """body{font:16px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color:#222}
svg{width:100%;height:auto}
pre{overflow-x:auto;background:#f5f5f5;padding:1rem;font-size:12px;line-height:1.3}
.key span{display:inline-block;margin-right:1rem}
.key i{display:inline-block;width:.8em;height:.8em;margin-right:.3em}"""
_WIDTH, _LEFT = 720, 130


def write_report(result: SimResult, path: Path) -> None:
    """Writes the page, making its directory."""
    body = [
        f"<h1>{escape(result.name)}</h1>",
        "<h2>Seconds of a step by phase</h2>",
        _bars(result.points),
        "<h2>Times as fast, by nodes</h2>" + _speedups(result) if result.comparisons else "",
        "<h2>Running requests over the last step's rollout</h2>",
        _curves(result.points),
        f"<h2>All figures</h2><pre>{escape(render(result))}</pre>",
    ]
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(result.name)}</title><style>{_STYLE}</style>{''.join(body)}</html>\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def _key(names: Sequence[str]) -> str:
    parts = [
        f'<span><i style="background:{_COLOURS[i % len(_COLOURS)]}"></i>{escape(name)}</span>'
        for i, name in enumerate(names)
    ]
    return f'<p class="key">{"".join(parts)}</p>'


def _bars(points: Sequence[Point]) -> str:
    """A stacked bar a point."""
    most = max(p.seconds for p in points)
    rows = []
    for line, p in enumerate(points):
        y, x = 6 + 26 * line, float(_LEFT)
        label = f"{p.nodes} node{'s' if p.nodes > 1 else ''}, {p.mode}"
        rows.append(f'<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(label)}</text>')
        for at, name in enumerate(PHASES):
            width = (_WIDTH - _LEFT - 70) * p.phases[name] / most
            title = f"<title>{escape(name)}: {p.phases[name]:.3g} s</title>"
            rows.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="18" fill="{_COLOURS[at]}">{title}</rect>'
            )
            x += width
        rows.append(f'<text x="{x + 6:.1f}" y="{y + 14}">{p.seconds:.3g} s</text>')
    return _svg(rows, 12 + 26 * len(points)) + _key(PHASES)


def _speedups(result: SimResult) -> str:
    """A line a mode: e2e speed-up over the nodes, which stand in equal distances."""
    nodes = sorted({c.nodes for c in result.comparisons})
    modes = list(dict.fromkeys(c.mode for c in result.comparisons))
    top = max(1.1, *(c.e2e for c in result.comparisons)) * 1.05
    x = {n: _LEFT + (_WIDTH - _LEFT - 60) * (i / max(1, len(nodes) - 1)) for i, n in enumerate(nodes)}

    low = min(1.0, *(c.e2e for c in result.comparisons))

    def y(value: float) -> float:
        return 220 - 200 * (value - low) / (top - low)

    rows = [f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y(1):.1f}" y2="{y(1):.1f}" stroke="#bbb"/>']
    rows += [f'<text x="{x[n]:.1f}" y="240" text-anchor="middle">{n}</text>' for n in nodes]
    for at, mode in enumerate(modes):
        values = {c.nodes: c.e2e for c in result.comparisons if c.mode == mode}
        trace = " ".join(f"{x[n]:.1f},{y(v):.1f}" for n, v in values.items())
        rows.append(f'<polyline points="{trace}" fill="none" stroke="{_COLOURS[at]}" stroke-width="2"/>')
        for n, v in values.items():
            rows.append(f'<circle cx="{x[n]:.1f}" cy="{y(v):.1f}" r="3" fill="{_COLOURS[at]}"/>')
            rows.append(f'<text x="{x[n] + 5:.1f}" y="{y(v) - 6:.1f}" font-size="12">{v:.2f}</text>')
    return _svg(rows, 250) + _key(modes)


def _curves(points: Sequence[Point]) -> str:
    """The running requests of every mode on the largest number of nodes."""
    largest = max(p.nodes for p in points)
    shown = [p for p in points if p.nodes == largest]
    end = max(p.shown.running[-1][0] for p in shown) or 1.0
    top = max(n for p in shown for _, n in p.shown.running) or 1
    rows = [f'<text x="{_LEFT - 8}" y="24" text-anchor="end">{top}</text>']
    rows += [f'<text x="{_WIDTH - 40}" y="240" text-anchor="end">{end:.4g} s</text>']
    for at, p in enumerate(shown):
        dots = [
            f"{_LEFT + (_WIDTH - _LEFT - 40) * t / end:.1f},{220 - 200 * math.log1p(n) / math.log1p(top):.1f}"
            for t, n in p.shown.running
        ]
        colour = _COLOURS[at]
        rows.append(f'<polyline points="{" ".join(dots)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if p.shown.speculation_from is not None:
            x = _LEFT + (_WIDTH - _LEFT - 40) * p.shown.speculation_from / end
            rows.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="20" y2="220" stroke="{colour}" stroke-dasharray="4"/>'
            )
    names = [f"{p.mode}, {p.nodes} nodes" for p in shown]
    return (
        _svg(rows, 250)
        + _key(names)
        + "<p>Requests on a logarithmic scale. Dashed: from here on most replicas speculate.</p>"
    )


def _svg(rows: Sequence[str], height: int) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" font-size="13" font-family="system-ui">{"".join(rows)}</svg>'
    )
