"""Tables and page say what the result holds."""

import re

import pytest

from megatron_tlt.observe.page import Chart
from megatron_tlt.sim.modes import on_nodes, simulate
from megatron_tlt.sim.report import build_page, write_report
from megatron_tlt.sim.tables import headline, simulation_text
from tests.helpers.sim import few_steps, sim_config  # noqa: F401

SPEC = "rollout.speculation"
EAGLE = (f"{SPEC}.drafter=eagle", f"{SPEC}.drafter_path=x", f"{SPEC}.selector=beg_mab")


@pytest.fixture(scope="module")
def result():
    return simulate(on_nodes(sim_config(*EAGLE, "name=A & B"), [1, 2]), ["off", "tlt"])


def test_tables_show_every_point(result):
    text = simulation_text(result)
    for point in result.points:
        assert re.search(rf"^{point.nodes} +{point.gpus} +{point.mode} ", text, re.M)
    for comparison in result.comparisons:
        assert f"{comparison.e2e:.3g}" in text
    for part in ("Mean steps", "assumed:"):
        assert part in text


def test_the_charts_hold_the_result(result, tmp_path):
    path = tmp_path / "deep" / "r.html"
    write_report(result, path)
    assert "A &amp; B" in path.read_text()
    sections = build_page(result).sections
    phases, e2e, _, idle = [p.traces for s in sections for p in s.parts if isinstance(p, Chart)]
    for at, point in enumerate(result.points):
        assert sum(trace["x"][at] for trace in phases) == pytest.approx(point.seconds, rel=1e-4)
        hours = sum(trace["x"][at] for trace in idle)
        assert hours == pytest.approx(point.mean.idle_gpu_seconds / 36, rel=1e-4, abs=1e-9)
    shown = {(trace["name"], x): y for trace in e2e for x, y in zip(trace["x"], trace["y"])}
    assert shown == {(c.mode, str(c.nodes)): pytest.approx(c.e2e, rel=1e-4) for c in result.comparisons}


def test_the_headline_names_the_best_mode_on_the_most_nodes(result):
    best = max((c for c in result.comparisons if c.nodes == 2), key=lambda c: c.e2e)
    said = build_page(result).headline
    assert simulation_text(result).splitlines()[2] == said == headline(result)
    assert said.startswith("On 2 nodes ") and (f"{best.e2e:.2f}" in said or best.e2e < 1.005)
