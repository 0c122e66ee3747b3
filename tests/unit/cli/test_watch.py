"""The live view: the last steps from the metrics, the ranks from their heartbeats; it ends with the run."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_tlt.cli import watch
from megatron_tlt.cli.main import main
from megatron_tlt.resilience.status_files import RankStatus, StatusFiles
from tests.helpers.synthetic_run import write_run


def beat(run_dir: Path, **more: Any) -> None:
    files = StatusFiles(run_dir)
    files.clear()
    status = RankStatus("a", 0, 2, "n0", 10, phase="rollout", step=10, state="BUSY", running=12, queued=5, longest=340)
    for rank in range(2):
        files.write_rank(replace(status, rank=rank, phase_at=time.time(), written_at=time.time(), **more))


def test_the_last_steps_and_what_the_ranks_do(tmp_path, capsys):
    folder = write_run(tmp_path / "r", ranks=2, steps=11, turns=True)
    beat(folder)
    assert main(["watch", str(folder), "--once"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("turns 1.50  waiting for tools 40%  aborted 3") == 8
    assert "held-out accuracy after step 11: 0.700" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert [row[1] for row in rows if row and row[0] == "step"] == [f"{step}/11" for step in range(4, 12)]
    assert rows[-1][3:6] == ["running", "rollout", "(BUSY)"] and rows[-1][-4:-1] == ["12", "5", "340"]


def test_a_run_that_has_just_started_has_its_ranks_alone(tmp_path, capsys):
    beat(tmp_path, running=7)
    assert main(["watch", str(tmp_path), "--once"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{tmp_path}: running, ") and " 7 " in shown.splitlines()[-1]


def test_watching_ends_with_the_run(tmp_path, capsys, monkeypatch):
    folder = write_run(tmp_path / ("r" * 90))  # longer than the terminal is wide
    beat(folder)
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            beat(folder, outcome="done")

    monkeypatch.setattr(watch.time, "sleep", sleep)
    assert main(["watch", str(folder)]) == 0
    assert len(looks) == 3 and "finished" in capsys.readouterr().out
