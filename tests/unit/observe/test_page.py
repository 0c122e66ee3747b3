"""The page's parts: escaping, tables, figures. tests/integration/test_report.py opens pages in a browser."""

from __future__ import annotations

import re

import pytest

from megatron_tlt.observe.page import Chart, Page, PageSection, Samples, Stat, Table, bar, cell_text


def test_text_from_data_cannot_become_markup():
    evil = "<script>alert('x')</script>&\"</style>"
    chart = Chart(evil, [bar(evil, [evil], [2], "red")], evil, evil, evil)
    samples = Samples([{"facts": evil, "prompt": evil, "answer": evil, "parts": [(evil, [("accepted", evil)])]}])
    section = PageSection(evil, [chart, Table([evil], [[evil]], evil, evil), samples], evil)
    page = Page(evil, evil, evil, [evil], [Stat(evil, evil, evil)], [section], evil)
    assert "<script>alert" not in page.html()


def test_cells_are_rounded_and_columns_of_numbers_aligned_to_the_right():
    shown = [cell_text(value) for value in (12345, 0.123456, 98765.4, 7e-06, None, "1.20×")]
    assert shown == ["12,345", "0.123", "98,765", "7e-06", "", "1.20×"]
    table = Table(["name", "share", "n"], [["a", "12.5%", 1], ["7", None, "-3 s"]])
    html = Page("t", sections=[PageSection("s", [table])]).html()
    assert re.findall(r"<th([^>]*)>(\w+)</th>", html) == [
        ("", "name"),
        (" class=number", "share"),
        (" class=number", "n"),
    ]


def test_a_misspelt_field_of_plotly_is_an_error():
    with pytest.raises(ValueError, match="hovertemplat"):
        _ = Chart("c", [bar("a", [1], [2], "red", hovertemplat="x")]).figure
