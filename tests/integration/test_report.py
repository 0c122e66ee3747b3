"""Reports in a real browser: no error, nothing fetched, charts with data, controls that work, both widths.

The browser is Debian's package `chromium` (`.ci/run` installs it); CHROMIUM names another one's program.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_tlt.cli.main import main
from tests.helpers.browser import Browser, find_chromium
from tests.helpers.synthetic_run import write_run

PROGRAM = find_chromium()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PROGRAM is None,
        reason="Chromium is not installed: apt-get install chromium, or set CHROMIUM=program",
    ),
]

# Points drawn in each chart: of lines, bars, and a heat map's cells.
DRAWN = """[...document.querySelectorAll('[data-chart]')].map(node => ({
  title: node.closest('figure').querySelector('h3').textContent,
  points: node._fullData.reduce((sum, t) => sum + (t.x?.length ?? 0), 0),
  marks: node.querySelectorAll(
    '.scatterlayer .js-line, .scatterlayer .js-fill, .barlayer path, .heatmaplayer image').length,
  width: node.querySelector('.main-svg').getBoundingClientRect().width,
}))"""
# Elements that stick out of the page, or words that stick out of their box.
OVERFLOW = """[...document.querySelectorAll('main *, header *, footer')].filter(e =>
  !e.closest('.scroll, svg, nav, pre') && e.getBoundingClientRect().right > innerWidth + 1
).map(e => e.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def browser():
    assert PROGRAM is not None
    browser = Browser(PROGRAM)
    yield browser
    browser.close()


@pytest.fixture(autouse=True)
def _fresh(browser):
    browser.problems.clear()
    browser.requests.clear()


def made(tmp_path: Path, *runs: Path) -> Path:
    out = tmp_path / "report.html"
    assert main(["report", *map(str, runs), "-o", str(out)]) == 0
    return out


def check(browser: Browser, page: Path, charts: int) -> None:
    """The page is whole at the present size."""
    assert browser.problems == []
    assert [url for url in browser.requests if not url.startswith("data:")] == [page.resolve().as_uri()]
    drawn = browser.evaluate(DRAWN)
    assert len(drawn) == charts
    assert [chart for chart in drawn if not chart["points"] or not chart["marks"]] == []
    assert [chart for chart in drawn if chart["width"] < 250] == []
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), browser.evaluate(OVERFLOW)
    assert browser.evaluate(OVERFLOW) == []


@pytest.mark.parametrize(("width", "dark"), [(1280, False), pytest.param(390, True, marks=pytest.mark.nightly)])
def test_a_run_loads_and_is_whole(browser, tmp_path, width, dark):
    page = made(tmp_path, write_run(tmp_path / "run", ranks=3, steps=6))
    browser.open(page, width, dark=dark)
    check(browser, page, 16)
    paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    ink = browser.evaluate("document.querySelector('[data-chart]').layout.font.color")
    assert (paper, ink) == (("rgb(20, 24, 27)", "#e7e9e6") if dark else ("rgb(251, 250, 247)", "#1d2328"))
    columns = browser.evaluate(
        "getComputedStyle(document.querySelector('.grid')).gridTemplateColumns.split(' ').length"
    )
    assert columns == (2 if width == 1280 else 1)


@pytest.mark.nightly
def test_controls_work(browser, tmp_path):
    page = made(tmp_path, write_run(tmp_path / "run", ranks=3, steps=6))
    browser.open(page, 1280)
    curve = (
        "[...document.querySelectorAll('[data-chart]')]"
        ".find(n => n.closest('figure').textContent.includes('Running requests'))"
    )
    other = browser.evaluate(
        f"[...{curve}.closest('figure').querySelectorAll('option:not(:checked)')][0].value"
    )
    before = browser.evaluate(f"JSON.stringify({curve}.data[0].x)")
    browser.evaluate(
        f"(() => {{const s = {curve}.closest('figure').querySelector('select'); s.value = '{other}';"
        "s.dispatchEvent(new Event('change'))})()"
    )
    browser.wait(f"JSON.stringify({curve}.data[0].x) !== {before!r}")

    browser.evaluate(f"{curve}.closest('figure').querySelector('[data-log]').id = 'log'")
    browser.click("#log")
    browser.wait(f"{curve}.layout.yaxis.type === 'log'")
    assert browser.evaluate("document.getElementById('log').getAttribute('aria-pressed')") == "true"

    refused = "getComputedStyle(document.querySelector('.sample .refused')).display"
    assert browser.evaluate(refused) == "none"
    browser.click("[data-refused]")
    assert browser.evaluate(refused) != "none"
    assert browser.evaluate("document.querySelector('.sample b, .sample i')") is None, "responses are text"
    assert browser.problems == []


@pytest.mark.nightly
def test_a_run_in_progress_with_nothing_extra(browser, tmp_path):
    run = write_run(
        tmp_path / "run",
        steps=2,
        num_steps=9,
        speculation=False,
        idle_training=False,
        evals=False,
        samples=False,
    )
    page = made(tmp_path, run)
    browser.open(page, 390)
    check(browser, page, 8)
    assert "2 of 9 steps" in browser.evaluate("document.querySelector('header').textContent")
    page = made(tmp_path, write_run(tmp_path / "new", steps=0, num_steps=9))
    browser.requests.clear()
    browser.open(page, 390)
    assert "No step is done yet" in browser.evaluate("document.getElementById('verdict').textContent")
    assert browser.problems == []


@pytest.mark.nightly
def test_two_runs(browser, tmp_path):
    a = write_run(tmp_path / "plain", steps=5, pace=2.0, speculation=False)
    b = write_run(tmp_path / "tlt", steps=7)
    page = made(tmp_path, a, b)
    browser.open(page, 390)
    check(browser, page, 11)
    verdict = browser.evaluate("document.getElementById('verdict').textContent")
    assert (
        verdict.startswith("Same responses and rewards in all 5 common steps. tlt is ") and "rollout" in verdict
    )


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    page = tmp_path_factory.mktemp("sim") / "sim.html"
    small = ["workload.steps=1", "workload.prompts_per_step=64", "workload.lengths.median=200"]
    quick = "rollout.speculation.selector=beg_mab"
    assert main(["simulate", "configs/sim/paper-7b.yaml", *small, quick, "--report", str(page)]) == 0
    return page


@pytest.mark.nightly
@pytest.mark.parametrize("width", [1280, 390])
def test_a_simulation_can_be_read_at_both_widths(browser, simulated, width):
    browser.open(simulated, width)
    check(browser, simulated, 5)
    hidden = """[...document.querySelectorAll('table.words')].filter(
      table => table.closest('.scroll').scrollWidth > table.closest('.scroll').clientWidth + 1).length"""
    assert browser.evaluate("document.querySelectorAll('table.words').length") == 1, "assumptions"
    assert browser.evaluate(hidden) == 0, "text is read without scrolling sideways"
    tall = """[...document.querySelectorAll('table:not(.words) tbody tr')].filter(
      row => row.getBoundingClientRect().height > 40).length"""
    assert browser.evaluate(tall) == 0, "a row of figures is one line"
