"""benchmarks/proof.py: its ratios, slopes and picture, from made-up runs."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.helpers.mpi import ROOT
from tests.helpers.synthetic_run import write_run

sys.path.insert(0, str(ROOT / "benchmarks"))
from lib import on_off, proof_curves, proof_picture
from proof import GOALS


def job(mode: str, rollout: float, idle: float, update: float, weights: str = "w", recovered: float = 0.0):
    step = {"idle/seconds": 2 * idle, "idle/recovered_seconds": recovered, "update/skipped_share": 0.25}
    step |= {"spec/accept_length": 4.0} if mode != "off" else {}
    phases = {"rollout": rollout, "idle": idle, "update": update}
    digests = {"responses": "a", "rewards": "r", "weights": weights}
    return {"mode": mode, "hidden": 1, "phases": phases, "steps": [step], **digests}


def test_ratios_of_two_rounds():
    on = [job("on", 3, 1, 4, recovered=1.5), job("on", 2, 1, 5, recovered=1.0)]
    rows = [job("off", 8, 4, 4), *on, job("off", 6, 6, 4)]
    figures = on_off.summarize(rows)
    assert figures["rollout"] == pytest.approx((12 / 4 + 12 / 3) / 2)
    assert figures["e2e"] == pytest.approx(16 / 8)
    assert figures["e2e_limit"] == pytest.approx(16 / 4.5)
    assert figures["recovered"] == pytest.approx(2.5 / 4)
    assert (figures["identical"], figures["accept_length"], figures["update_saved"]) == (1.0, 4.0, 0.25)


def test_other_weights_are_not_identical_and_the_goal_is_missed():
    figures = on_off.summarize([job("off", 8, 4, 4), job("on", 3, 1, 4, weights="other")])
    assert figures["identical"] == 0.0
    assert "MISSED" in next(line for line in on_off.judge(figures, GOALS) if line.startswith("same responses"))


def test_slope_of_a_power_law():
    assert proof_curves.slope((2, 4, 8), [3 * x**1.5 for x in (2, 4, 8)]) == pytest.approx(1.5)


def test_the_picture_has_lanes_of_both_runs_on_one_axis(tmp_path: Path):
    for mode, pace in (("off", 2.0), ("on", 1.0)):
        write_run(tmp_path / mode, steps=3, ranks=2, pace=pace)
    seconds = {"off": {"rollout": 4.0, "update": 1.0}, "on": {"rollout": 2.0, "update": 1.0}}
    runs = {mode: tmp_path / mode for mode in seconds}
    svg = ET.fromstring(proof_picture.draw(runs, seconds, {"identical": 1.0, "rollout": 2.0, "e2e": 1.67}))
    texts = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert "Rollout 2.00x, step 1.67x; same responses, rewards and weights" in texts
    assert [t for t in texts if t and "rank " in t][-4:] == ["off, rank 0", "off, rank 1", "on, rank 0", "on, rank 1"]
    ends = [float(r.get("x", 0)) + float(r.get("width", 0)) for r in svg.iter("{http://www.w3.org/2000/svg}rect")]
    assert proof_picture.WIDTH - 120 < sorted(ends)[-2] <= proof_picture.WIDTH - proof_picture.RIGHT + 1
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}polyline"))) == 2
