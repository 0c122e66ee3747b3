"""The page's parts: escaping, tables, data. What a browser makes of it is in tests/integration/test_report.py."""

from __future__ import annotations

import json
import re

import pytest

from megatron_tlt.observe import page as page_module
from megatron_tlt.observe.page import Chart, Page, ReportError, Section, Table, Tile, plotly_script


def data_of(html: str) -> list:
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def body_of(html: str) -> str:
    """The document before its scripts."""
    return html[: html.index('<script type="application/json"')]


def test_text_of_others_cannot_become_markup():
    evil = "<script>alert('x')</script>&\"</style>"
    page = Page(evil, evil, evil, "good", [Tile(evil, evil, evil)], footer=evil)
    chart = Chart(
        evil, [{"type": "scatter", "name": evil, "x": [1], "y": [2]}], evil, evil, evil, {evil: [], "b": []}
    )
    page.sections.append(Section("One", [chart, Table([evil], [[evil]], evil, evil)], evil))
    html = page.html()
    assert "<script>alert" not in html
    assert data_of(html)[0]["traces"][0]["name"] == evil


def test_nothing_is_fetched():
    html = Page("t", sections=[Section("s", [Chart("c", [])])]).html()
    outside = [link for link in re.findall(r'(?:src|href)="([^"]*)"', body_of(html)) if link[:1] != "#"]
    assert outside == ["data:,"]
    assert "@import" not in body_of(html) and "url(" not in body_of(html)


def test_cells_show_numbers_to_the_right():
    rows = [["a", 12345, "12.5%"], ["7", 0.123456, "1.20×"], ["c", 98765.4, None], ["d", 7e-06, "-3 s"]]
    table = Table(["name", "n", "share"], rows)
    html = body_of(Page("t", sections=[Section("s", [table])]).html())
    for cell in ("12,345", "12.5%", "0.123", "1.20×", "98,765", "7e-06", "-3 s"):
        assert re.search(rf'<td class=number data-head="\w+">{re.escape(cell)}</td>', html)
    assert '<td class=name data-head="name">7</td>' in html, "a column of names stays to the left"
    assert "<th class=name>name</th>" in html and "<th class=number>share</th>" in html


def test_a_missing_plotly_is_named(monkeypatch):
    assert "plotly.js v" in plotly_script()[:200]
    monkeypatch.setattr(page_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ReportError, match="pip install plotly"):
        plotly_script()
