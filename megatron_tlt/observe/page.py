"""Charts, tables and text as one self-contained HTML page, for any data. Torch-free.

    page = Page("A title", "a line under it")
    page.stats.append(Stat("speed-up", "1.8x", "over plain decoding"))
    chart = Chart("by phase", [bar("update", steps, seconds, colours.GREEN)])
    parts = [chart, Table(["phase", "seconds"], [["update", 3.1]])]
    page.sections.append(PageSection("Step time", parts))
    Path("out.html").write_text(page.html(), encoding="utf-8")

A trace is a plotly trace as a dict (https://plotly.com/python/reference/). plotly.js is copied into the page from the
package `plotly`: the page loads nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from plotly.graph_objects import Figure
from plotly.io import to_html
from plotly.offline import get_plotlyjs

from megatron_tlt.observe import colours
from megatron_tlt.observe.summary import Stat

Trace = dict[str, Any]
Cell = str | float | int | None

_NUMBER = re.compile(r"[-+]?[\d.,]+ ?(%|×|s)?")
_MARKED_POINTS = 40
"""Points up to which each point of a line has a marker."""
_LAYOUT: dict[str, Any] = {
    "template": "plotly_white",
    "colorway": colours.CYCLE,
    "font": {"color": colours.INK},
    "hovermode": "x unified",
    "showlegend": True,
    "margin": {"l": 50, "r": 10, "t": 16, "b": 40},
    "legend": {
        "orientation": "h",
        "x": 0,
        "y": 0,
        "yref": "container",
        "yanchor": "bottom",
        "traceorder": "normal",
    },
    "yaxis": {"rangemode": "tozero"},
    "yaxis2": {"overlaying": "y", "side": "right", "showgrid": False, "rangemode": "tozero"},
}


def line(name: str, x: Collection[Any], y: Collection[Any], colour: str, **more: Any) -> Trace:
    """A line; with markers too while there are few points. `more` replaces keys of the trace."""
    mode = "lines+markers" if len(x) <= _MARKED_POINTS else "lines"
    trace = {"type": "scatter", "mode": mode, "name": name, "x": list(x), "y": list(y)}
    return trace | {"line": {"color": colour}} | more


def bar(name: str, x: Sequence[Any], y: Sequence[Any], colour: str, **more: Any) -> Trace:
    """Bars of one colour. `more` replaces keys of the trace."""
    return {"type": "bar", "name": name, "x": list(x), "y": list(y), "marker": {"color": colour}} | more


@dataclass
class Chart:
    """One figure."""

    title: str
    traces: Sequence[Trace] = ()
    x: str = ""
    y: str = ""
    note: str = ""
    layout: dict[str, Any] = field(default_factory=dict)
    """plotly layout on top of the page's own."""
    height: int = 300
    """Pixels."""
    wide: bool = False
    kind: ClassVar = "chart"

    @property
    def figure(self) -> Figure:
        """The plotly figure. Raises ValueError for a trace or layout that plotly does not know."""
        figure = Figure(list(self.traces))
        figure.update_layout(_LAYOUT, height=self.height, xaxis_title_text=self.x, yaxis_title_text=self.y)
        figure.update_layout(self.layout)
        return figure

    def html(self) -> Markup:
        """The figure as a <div> and the <script> that draws it."""
        config = {"displayModeBar": False, "responsive": True}
        return Markup(to_html(self.figure, config, include_plotlyjs=False, full_html=False))


@dataclass
class Table:
    """Rows of text and numbers. Columns of numbers are aligned to the right."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    note: str = ""
    wide: bool = False
    kind: ClassVar = "table"

    @property
    def is_number(self) -> list[bool]:
        """For each column, whether all its cells are numbers, perhaps with a unit."""
        return [all(_is_number(row[at]) for row in self.rows) for at in range(len(self.head))]


@dataclass
class Samples:
    """Responses as text, each with its `facts` and its `parts`: (facts, stretches), of stretches (CSS class, text)."""

    rows: Sequence[Mapping[str, Any]]
    wide: bool = True
    title: str = ""
    note: str = ""
    kind: ClassVar = "samples"


Part = Chart | Table | Samples


@dataclass
class PageSection:
    """A heading, a sentence, and parts side by side where there is room. A section without parts is left out."""

    title: str
    parts: Sequence[Part] = ()
    text: str = ""


@dataclass
class Page:
    """A whole report."""

    title: str
    subtitle: str = ""
    headline: str = ""
    """The result in a sentence or two."""
    warnings: Sequence[str] = ()
    """Parts that the page lacks, with the reason, one sentence each."""
    stats: list[Stat] = field(default_factory=list)
    sections: list[PageSection] = field(default_factory=list)
    footer: str = ""

    def html(self) -> str:
        """The document."""
        sections = [section for section in self.sections if section.parts]
        template = _TEMPLATES.get_template("page.html")
        return template.render(page=self, sections=sections, plotly=Markup(get_plotlyjs()))


def page_begins() -> bytes:
    """The pattern with which every page begins."""
    head = (Path(__file__).parent / "page.html").read_bytes().partition(b"{{")[0]
    return re.escape(head)


def _is_number(cell: Cell) -> bool:
    return not isinstance(cell, str) or not cell or bool(_NUMBER.fullmatch(cell))


def cell_text(value: Cell) -> str:
    """A cell as it is shown; numbers with three digits or so."""
    if isinstance(value, float):
        if 0 < abs(value) < 0.0005:
            return f"{value:.3g}"
        digits = next((n for limit, n in ((1000, 0), (100, 1), (1, 2)) if abs(value) >= limit), 3)
        return f"{value:,.{digits}f}"
    return f"{value:,}" if isinstance(value, int) else value or ""


_TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
_TEMPLATES.filters["cell"] = cell_text
