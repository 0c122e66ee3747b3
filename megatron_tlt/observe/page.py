"""Building blocks of a self-contained HTML page: figures, tables, tiles. Knows nothing of runs. Torch-free.

    page = Page("A title", "a line under it")
    page.tiles.append(Tile("speed-up", "1.8x", "over plain decoding"))
    parts = [Chart("by phase", traces=[...]), Table(["phase", "seconds"], [["update", 3.1]])]
    page.sections.append(Section("Step time", parts))
    Path("out.html").write_text(page.html(), encoding="utf-8")

A trace is a plotly.js trace as a dict (https://plotly.com/javascript/reference/). Colours may be written as roles,
which follow the light or dark theme: "@1" to "@8", "@ink", "@muted", "@line", "@busy", "@idle", "@training".
plotly.js comes from the installed package `plotly`, of which only that file is used, and goes into the page: nothing
is fetched.
"""

from __future__ import annotations

import html
import importlib.util
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_tlt.errors import TltError

Trace = dict[str, Any]
Cell = str | float | int | None

_FIGURE = re.compile(r"[-+]?[\d.,]+ ?(%|×|s)?")
_HERE = Path(__file__).parent
_NAME, _SENTENCE = 24, 40
"""Characters up to which a cell is a name that stays on one line, and beyond which it is text that needs room."""


class ReportError(TltError):
    """A page cannot be made."""


@dataclass
class Tile:
    """One number that a reader should see first."""

    label: str
    value: str
    note: str = ""


@dataclass
class Chart:
    """One figure. With `choices` (name to traces) a reader picks which of them is shown, `traces` being in all."""

    title: str
    traces: list[Trace] = field(default_factory=list)
    x: str = ""
    y: str = ""
    note: str = ""
    choices: Mapping[str, Sequence[Trace]] = field(default_factory=dict)
    chosen: str = ""
    """The choice shown first; default: the first one."""
    choice_label: str = "step"
    layout: dict[str, Any] = field(default_factory=dict)
    """plotly layout on top of the page's own."""
    height: int = 300
    wide: bool = False
    log_switch: bool = False
    """Whether a button changes the y axis between linear and logarithmic."""

    def spec(self) -> dict[str, Any]:
        """What the page's script needs."""
        return {
            "traces": self.traces,
            "choices": {name: list(traces) for name, traces in self.choices.items()},
            "x": self.x,
            "y": self.y,
            "layout": self.layout,
        }


@dataclass
class Table:
    """Rows of text and numbers. Numbers stand to the right."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    note: str = ""
    wide: bool = False


@dataclass
class Markup:
    """HTML as it is; whoever makes it has escaped what is not his own."""

    html: str
    wide: bool = True


Part = Chart | Table | Markup


@dataclass
class Section:
    """A heading, a sentence, and parts side by side where there is room."""

    title: str
    parts: list[Part] = field(default_factory=list)
    text: str = ""

    @property
    def anchor(self) -> str:
        """The section's id in the page."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


@dataclass
class Page:
    """A whole report."""

    title: str
    subtitle: str = ""
    verdict: str = ""
    """One sentence that answers the question the page was made for."""
    tone: str = ""
    """Of the verdict: "good", "bad" or neither."""
    tiles: list[Tile] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
    footer: str = ""

    def html(self) -> str:
        """The document. Raises ReportError where plotly is not installed."""
        charts: list[dict[str, Any]] = []
        sections = [s for s in self.sections if s.parts]
        body = "".join(_section(section, charts) for section in sections)
        links = "".join(f'<a href="#{s.anchor}">{_text(s.title)}</a>' for s in sections)
        return _DOCUMENT.format(
            title=_text(self.title),
            css=(_HERE / "page.css").read_text(encoding="utf-8"),
            subtitle=_text(self.subtitle),
            links=links,
            verdict=_verdict(self.verdict, self.tone),
            tiles=_tiles(self.tiles),
            body=body,
            footer=_text(self.footer),
            data=_json(charts),
            plotly=plotly_script(),
            script=(_HERE / "page.js").read_text(encoding="utf-8"),
        )


def plotly_script() -> str:
    """plotly.js, ready to stand in a <script>. Raises ReportError where the package is not installed."""
    found = importlib.util.find_spec("plotly")
    places = list(found.submodule_search_locations or []) if found is not None else []
    for place in places:
        path = Path(place) / "package_data" / "plotly.min.js"
        if path.is_file():
            return path.read_text(encoding="utf-8").replace("</script", "<\\/script")
    raise ReportError("reports need the package plotly (pip install plotly), which is not installed")


def _json(value: Any) -> str:
    """JSON that may stand in a <script>; numbers that JSON lacks become null."""
    text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _text(value: str) -> str:
    return html.escape(value, quote=True)


def _verdict(text: str, tone: str) -> str:
    return f'<p class="verdict {_text(tone)}" id="verdict">{_text(text)}</p>' if text else ""


def _tiles(tiles: Sequence[Tile]) -> str:
    cells = [
        f"<div class=tile><dt>{_text(t.label)}</dt><dd>{_text(t.value)}<small>{_text(t.note)}</small></dd></div>"
        for t in tiles
    ]
    return f"<dl class=tiles>{''.join(cells)}</dl>" if cells else ""


def _section(section: Section, charts: list[dict[str, Any]]) -> str:
    parts = []
    for part in section.parts:
        if isinstance(part, Chart):
            parts.append(_chart(part, len(charts)))
            charts.append(part.spec())
        elif isinstance(part, Table):
            parts.append(_table(part))
        else:
            parts.append(f'<div class="block{" wide" if part.wide else ""}">{part.html}</div>')
    text = f"<p class=lead>{_text(section.text)}</p>" if section.text else ""
    return (
        f'<section id="{section.anchor}"><h2>{_text(section.title)}</h2>{text}'
        f"<div class=grid>{''.join(parts)}</div></section>"
    )


def _chart(chart: Chart, index: int) -> str:
    controls = ""
    if len(chart.choices) > 1:
        options = "".join(
            f'<option value="{_text(name)}"{" selected" if name == chart.chosen else ""}>{_text(name)}</option>'
            for name in chart.choices
        )
        controls += f"<label>{_text(chart.choice_label)} <select data-choice>{options}</select></label>"
    if chart.log_switch:
        controls += '<button type=button data-log aria-pressed="false">log scale</button>'
    note = f"<p class=note>{_text(chart.note)}</p>" if chart.note else ""
    return (
        f'<figure class="block{" wide" if chart.wide else ""}"><figcaption><h3>{_text(chart.title)}</h3>'
        f"<span class=controls>{controls}</span></figcaption>"
        f'<div class=chart id="chart-{index}" data-chart="{index}" style="height:{chart.height}px"></div>'
        f"{note}</figure>"
    )


def _table(table: Table) -> str:
    title = f"<h3>{_text(table.title)}</h3>" if table.title else ""
    columns = [[row[i] for row in table.rows] for i in range(len(table.head))]
    kinds = [_kind(cells, is_first=at == 0) for at, cells in enumerate(columns)]
    head = "".join(
        f"<th{_class(kind)}>{_text(name)}</th>" for name, kind in zip(table.head, kinds, strict=True)
    )
    rows = "".join(
        f"<tr>{''.join(_cell(*cell) for cell in zip(row, kinds, table.head, strict=True))}</tr>"
        for row in table.rows
    )
    note = f"<p class=note>{_text(table.note)}</p>" if table.note else ""
    words = any(isinstance(cell, str) and len(cell) > _SENTENCE for cells in columns for cell in cells)
    return (
        f'<div class="block{" wide" if table.wide else ""}">{title}<div class=scroll><table{_class("words" * words)}>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{note}</div>"
    )


def _kind(cells: Sequence[Cell], is_first: bool) -> str:
    """How a column is shown: figures to the right, names on one line, all else as it fits."""
    if _is_number_column(cells):
        return "number"
    longest = max((len(cell) for cell in cells if isinstance(cell, str)), default=0)
    return "name" if longest <= (_SENTENCE if is_first else _NAME) else ""


def _class(name: str) -> str:
    return f" class={name}" if name else ""


def _is_number_column(cells: Sequence[Cell]) -> bool:
    """Whether everything in a column is a figure, perhaps with its unit."""
    return all(c in (None, "") or not isinstance(c, str) or _FIGURE.fullmatch(c) for c in cells)


def _cell(value: Cell, kind: str, head: str) -> str:
    if isinstance(value, float):
        digits = next((n for limit, n in ((1000, 0), (100, 1), (1, 2)) if abs(value) >= limit), 3)
        value = f"{value:,.{digits}f}"
    elif isinstance(value, int):
        value = f"{value:,}"
    return f'<td{_class(kind)} data-head="{_text(head)}">{_text(value or "")}</td>'


_DOCUMENT = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{css}</style>
</head>
<body>
<header>
<div><h1>{title}</h1><p class=subtitle>{subtitle}</p></div>
<button type=button id=theme aria-label="change between light and dark">light / dark</button>
</header>
<nav>{links}</nav>
<main>
{verdict}
{tiles}
{body}
</main>
<footer>{footer}</footer>
<script type="application/json" id="charts">{data}</script>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""
