"""Building blocks of a self-contained HTML page: charts, tables, tiles; for any data. Torch-free.

    page = Page("A title", "a line under it")
    page.tiles.append(Tile("speed-up", "1.8x", "over plain decoding"))
    parts = [Chart("by phase", [bar("update", steps, seconds, "@1")]), Table(["phase", "seconds"], [["update", 3.1]])]
    page.sections.append(Section("Step time", parts))
    Path("out.html").write_text(page.html(), encoding="utf-8")

A trace is a plotly.js trace as a dict (https://plotly.com/javascript/reference/). Colours may be written as roles,
which follow the light or dark theme: "@1" to "@8", "@ink", "@muted", "@line", "@busy", "@idle", "@training".
plotly.js comes from the installed package `plotly`, of which only that file is used, and is copied into the page:
nothing is fetched.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from megatron_tlt.errors import TltError
from megatron_tlt.observe.jsonl import to_json

Trace = dict[str, Any]
Cell = str | float | int | None

_NUMBER = re.compile(r"[-+]?[\d.,]+ ?(%|×|s)?")
_HERE = Path(__file__).parent
_NAME, _SENTENCE = 24, 40
"""Characters up to which a cell is a name that stays on one line, and above which it is text that may wrap."""
_MARKED_POINTS = 40
"""Points up to which each point of a line has a marker."""


class ReportError(TltError):
    """A page cannot be made."""


def line(
    name: str, x: Collection[Any], y: Collection[Any], colour: str, dash: str = "solid", **more: Any
) -> Trace:
    """A line; with markers too while there are few points. `more` replaces keys of the trace."""
    mode = "lines+markers" if len(x) <= _MARKED_POINTS else "lines"
    style = {"color": colour, "width": 2, "dash": dash}
    return {"type": "scatter", "mode": mode, "name": name, "x": list(x), "y": list(y), "line": style} | more


def bar(name: str, x: Sequence[Any], y: Sequence[Any], colour: str, **more: Any) -> Trace:
    """Bars of one colour. `more` replaces keys of the trace."""
    return {"type": "bar", "name": name, "x": list(x), "y": list(y), "marker": {"color": colour}} | more


@dataclass
class Tile:
    """One number at the top of the page."""

    label: str
    value: str
    note: str = ""


@dataclass
class Chart:
    """One figure: `traces`, and those of one of the `choices` (name to traces), which a reader picks."""

    title: str
    traces: Sequence[Trace] = ()
    x: str = ""
    y: str = ""
    note: str = ""
    choices: Mapping[str, Sequence[Trace]] = field(default_factory=dict)
    chosen: str = ""
    """The choice shown first; default: the first one."""
    layout: dict[str, Any] = field(default_factory=dict)
    """plotly layout on top of the page's own."""
    height: int = 300
    wide: bool = False
    log_switch: bool = False
    """Whether a button changes the y axis between linear and logarithmic."""
    template: ClassVar = "chart.html"


@dataclass
class Table:
    """Rows of text and numbers. Columns of numbers are aligned to the right."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    note: str = ""
    wide: bool = False
    template: ClassVar = "table.html"

    @property
    def has_text(self) -> bool:
        """Whether a cell is text that wraps."""
        return any(isinstance(cell, str) and len(cell) > _SENTENCE for row in self.rows for cell in row)

    @property
    def kinds(self) -> list[str]:
        """CSS class of each column."""
        columns = [[row[i] for row in self.rows] for i in range(len(self.head))]
        return [_column_kind(cells, is_first=at == 0) for at, cells in enumerate(columns)]


@dataclass
class Samples:
    """Responses as text, each with its `facts` and its `stretches`: (CSS class, text)."""

    rows: Sequence[Mapping[str, Any]]
    longest: int
    """Characters of a text that are shown."""
    template: ClassVar = "samples.html"


Part = Chart | Table | Samples


@dataclass
class Section:
    """A heading, a sentence, and parts side by side where there is room."""

    title: str
    parts: Sequence[Part] = ()
    text: str = ""

    @property
    def anchor(self) -> str:
        """The section's id in the page."""
        return self.title.lower().replace(" ", "-")


@dataclass
class Page:
    """A whole report."""

    title: str
    subtitle: str = ""
    verdict: str = ""
    """One sentence that responses the prompt the page was made for."""
    tone: str = ""
    """Of the verdict: "good", "bad" or neither."""
    warnings: Sequence[str] = ()
    """What the page lacks and why, one sentence each."""
    tiles: list[Tile] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
    footer: str = ""

    def html(self) -> str:
        """The document. Raises ReportError where plotly is not installed."""
        sections = [section for section in self.sections if section.parts]
        charts = [part for section in sections for part in section.parts if isinstance(part, Chart)]
        fields = ("traces", "choices", "x", "y", "layout")
        return _TEMPLATES.get_template("page.html").render(
            page=self,
            sections=sections,
            css=_file(_HERE / "page.css"),
            data=_json([{name: getattr(chart, name) for name in fields} for chart in charts]),
            plotly=plotly_script(),
            script=_file(_HERE / "page.js"),
        )


def plotly_script() -> Markup:
    """plotly.js, ready to stand in a <script>. Raises ReportError where the package is not installed."""
    found = importlib.util.find_spec("plotly")
    if found is None or found.origin is None:
        raise ReportError("reports need the package plotly (pip install plotly), which is not installed")
    return _file(Path(found.origin).parent / "package_data" / "plotly.min.js")


def _file(path: Path) -> Markup:
    return Markup(path.read_text(encoding="utf-8").replace("</script", "<\\/script"))


def _json(value: Any) -> Markup:
    """JSON that may stand in a <script>; numbers that JSON lacks become null."""
    return Markup(
        json.dumps(to_json(value), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    )


def _column_kind(cells: Sequence[Cell], is_first: bool) -> str:
    """CSS class of a column: numbers (perhaps with their unit) to the right, names on one line, else none."""
    if all(c in (None, "") or not isinstance(c, str) or _NUMBER.fullmatch(c) for c in cells):
        return "number"
    longest = max((len(cell) for cell in cells if isinstance(cell, str)), default=0)
    return "name" if longest <= (_SENTENCE if is_first else _NAME) else ""


def cell_text(value: Cell) -> str:
    """A cell as it is shown; numbers with three digits or so."""
    if isinstance(value, float):
        if 0 < abs(value) < 0.0005:
            return f"{value:.3g}"
        digits = next((n for limit, n in ((1000, 0), (100, 1), (1, 2)) if abs(value) >= limit), 3)
        return f"{value:,.{digits}f}"
    return f"{value:,}" if isinstance(value, int) else value or ""


_TEMPLATES = Environment(loader=FileSystemLoader(_HERE), autoescape=True, trim_blocks=True)
_TEMPLATES.filters["cell"] = cell_text
