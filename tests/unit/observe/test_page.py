"""The page's parts: escaping, tables, data. What a browser makes of it is in tests/integration/test_report.py."""

from __future__ import annotations

import json
import re

import pytest
from markupsafe import Markup

from megatron_tlt.observe import page as page_module
from megatron_tlt.observe.page import Chart, Html, Page, ReportError, Section, Table, Tile, plotly_script


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


def test_numbers_that_json_lacks_become_null():
    chart = Chart("c", [{"x": [1.0, float("nan"), float("inf")], "y": (2, None, True)}])
    assert data_of(Page("t", sections=[Section("s", [chart])]).html())[0]["traces"][0] == {
        "x": [1.0, None, None],
        "y": [2, None, True],
    }


def test_sections_without_parts_are_left_out_and_anchors_fit():
    page = Page("t", sections=[Section("Idle time", [Html(Markup("<b>x</b>"))]), Section("Nothing")])
    html = body_of(page.html())
    assert 'href="#idle-time"' in html and 'id="idle-time"' in html and "Nothing" not in html


def test_cells_show_numbers_to_the_right():
    rows = [["a", 12345, "12.5%"], ["7", 0.123456, "1.20×"], ["c", 98765.4, None], ["d", 7e-06, "-3 s"]]
    table = Table(["name", "n", "share"], rows)
    html = body_of(Page("t", sections=[Section("s", [table])]).html())
    for cell in ("12,345", "12.5%", "0.123", "1.20×", "98,765", "0.000", "-3 s"):
        assert re.search(rf'<td class=number data-head="\w+">{re.escape(cell)}</td>', html)
    assert '<td class=name data-head="name">7</td>' in html, "a column of names stays to the left"
    assert "<th class=name>name</th>" in html and "<th class=number>share</th>" in html


def test_text_may_wrap_and_names_may_not():
    text = "a sentence of more than forty characters, to be read"
    html = body_of(Page("t", sections=[Section("s", [Table(["a", "b", "c"], [["x", "y y", text]])])]).html())
    assert "<table class=words>" in html
    assert '<td class=name data-head="a">x</td><td class=name data-head="b">y y</td>' in html
    assert f'<td data-head="c">{text}</td>' in html
    first = body_of(Page("t", sections=[Section("s", [Table(["a", "b"], [[text, 1]])])]).html())
    assert f'<td data-head="a">{text}</td>' in first, "the first column, too"
    short = body_of(Page("t", sections=[Section("s", [Table(["a", "b"], [["x", "eagle (100%)"]])])]).html())
    assert "<table>" in short


def test_controls_only_where_there_is_a_choice():
    traces = [{"x": [1], "y": [1]}]
    one = Page("t", sections=[Section("s", [Chart("c", choices={"1": traces})])]).html()
    two = Page(
        "t", sections=[Section("s", [Chart("c", choices={"1": traces, "2": traces}, chosen="2")])]
    ).html()
    assert "data-choice" not in body_of(one)
    assert '<option value="2" selected>' in body_of(two)


def test_a_missing_plotly_is_named(monkeypatch):
    assert "plotly.js v" in plotly_script()[:200]
    monkeypatch.setattr(page_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ReportError, match="pip install plotly"):
        plotly_script()
