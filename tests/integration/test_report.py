"""Reports in a real browser: no error, nothing loaded, charts with data at both widths, controls that work.

The browser is Debian's package `chromium` (`.ci/run` installs it); CHROMIUM names another one's program.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_tlt.cli.main import main
from tests.helpers.browser import find_chromium, run_in_page
from tests.helpers.synthetic_run import write_run

PROGRAM = find_chromium()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PROGRAM is None, reason="Chromium is not installed: apt-get install chromium, or set CHROMIUM=program"
    ),
]

# Of each chart its title, drawn marks and width; elements wider than the page; what the page loaded.
LOOK = """() => ({
  charts: [...document.querySelectorAll('.plotly-graph-div')].map(node => ({
    title: node.closest('figure').querySelector('h3').textContent,
    marks: node.querySelectorAll('.scatterlayer .js-line, .scatterlayer .js-fill, .barlayer path').length,
    width: node.querySelector('.main-svg').getBoundingClientRect().width,
  })),
  columns: new Set([...document.querySelectorAll('figure')].map(e => e.getBoundingClientRect().left)).size,
  overflow: [...document.querySelectorAll('section *, header *, footer')].filter(e =>
    !e.closest('.scroll, svg, nav, pre') && e.getBoundingClientRect().right > innerWidth + 1
  ).map(e => e.outerHTML.slice(0, 80)),
  loaded: performance.getEntriesByType('resource').map(e => e.name).filter(name => !name.startsWith('data:')),
  text: document.body.innerText,
})"""


def look(page: Path, width: int, charts: int) -> str:
    """Checks the page at one width; returns its text."""
    assert PROGRAM is not None
    found = run_in_page(PROGRAM, page, width, LOOK)
    assert (len(found["charts"]), found["loaded"], found["overflow"]) == (charts, [], [])
    assert [chart for chart in found["charts"] if not chart["marks"] or chart["width"] < 250] == []
    assert found["columns"] == (2 if width == 1280 else 1)
    return found["text"]


def made(tmp_path: Path, run: Path) -> Path:
    out = tmp_path / "report.html"
    assert main(["report", str(run), "-o", str(out)]) == 0
    return out


@pytest.mark.parametrize("width", [1280, pytest.param(500, marks=pytest.mark.nightly)])
def test_a_run_loads_and_is_whole(tmp_path, width):
    page = made(tmp_path, write_run(tmp_path / "run", ranks=3, steps=6))
    look(page, width, 6)


@pytest.mark.nightly
@pytest.mark.parametrize("width", [1280, 500])
def test_a_simulation_can_be_read_at_both_widths(tmp_path, width):
    page = tmp_path / "sim.html"
    small = ["workload.steps=1", "workload.prompts_per_step=64", "workload.lengths.median=200"]
    quick = "rollout.speculation.selector=beg_mab"
    assert main(["simulate", "configs/sim/paper-7b.yaml", *small, quick, "--report", str(page)]) == 0
    look(page, width, 4)
