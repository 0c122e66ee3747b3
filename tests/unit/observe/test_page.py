"""The page's parts: escaping, tables, figures. tests/integration/test_report.py opens pages in a browser."""

from __future__ import annotations

from megatron_tlt.observe.page import Chart, Page, PageSection, Samples, Table, bar
from megatron_tlt.observe.summary import Stat


def test_text_from_data_cannot_become_markup():
    evil = "<script>alert('x')</script>&\"</style>"
    chart = Chart(evil, [bar(evil, [evil], [2], "red")], evil, evil, evil)
    samples = Samples([{"facts": evil, "prompt": evil, "answer": evil, "parts": [(evil, [("accepted", evil)])]}])
    section = PageSection(evil, [chart, Table([evil], [[evil]], evil, evil), samples], evil)
    page = Page(evil, evil, evil, [evil], [Stat(evil, evil, evil)], [section], evil)
    assert "<script>alert" not in page.html()
