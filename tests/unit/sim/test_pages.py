"""Tables and page say what the result holds."""

import re
from html.parser import HTMLParser

import pytest

from megatron_tlt.sim.modes import simulate
from megatron_tlt.sim.report import write_report
from megatron_tlt.sim.tables import columns, render
from tests.helpers.sim import sim_config

EAGLE = ("rollout.speculation.drafter=eagle", "rollout.speculation.drafter_path=x")


@pytest.fixture(scope="module")
def result():
    return simulate(sim_config(*EAGLE, "engine=bulk", "name=A & B"), ["off", "tlt"], [1, 2])


def test_tables_show_every_point(result):
    text = render(result)
    for point in result.points:
        assert f"{point.nodes:5d} {point.gpus:4d} {point.mode}" in text
    for comparison in result.comparisons:
        assert f"{comparison.e2e:.2f}" in text
    for part in ("running requests over", "recommended:", "assumed:", "eagle_"):
        assert part in text


def test_columns_are_under_each_other():
    lines = columns([["a", "b"], ["longer", "1"], ["x", "22"]]).splitlines()
    assert lines == ["a        b", "----------", "longer   1", "x       22"]


class Checker(HTMLParser):
    VOID = ("meta", "rect", "line", "circle", "polyline")

    def __init__(self):
        super().__init__()
        self.open, self.count = [], {}

    def handle_starttag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_alone(result, tmp_path):
    path = tmp_path / "deep" / "r.html"
    write_report(result, path)
    text = path.read_text()
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert checker.count["svg"] == 3 and checker.count["rect"] == 8 * len(result.points)
    assert "A &amp; B" in text and "<script" not in text
    assert not re.search(r'(src|href)="', text)
