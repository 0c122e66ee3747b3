"""The live view, drawn into text."""

from __future__ import annotations

import io
import time
from pathlib import Path

from rich.console import Console

from megatron_tlt.observe.events import EventLog
from megatron_tlt.observe.live import read_view, render, watch
from tests.helpers.synthetic_run import write_run


def drawn(run_dir: Path, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render(*read_view(run_dir), time.time()))
    return console.file.getvalue()


def line_of(text: str, rank: int) -> list[str]:
    """A rank's row of the last table."""
    return next(row for line in reversed(text.splitlines()) if (row := line.split()) and row[0] == str(rank))


def test_phases_and_requests_are_live(tmp_path):
    logs = [EventLog(tmp_path, rank) for rank in range(2)]
    for log in logs:
        log.enter("rollout", 3)
    logs[0]._running_written = 0.0
    logs[0].running(3, 12, 5, 340)
    with logs[1].span("rollout", 3):
        pass
    logs[1].enter("idle", 3)
    text = drawn(tmp_path)
    assert "rollout: 1" in text and "idle: 1" in text
    assert "12 running, 5 waiting, 340 tokens" in text
    assert line_of(text, 0)[:3] == ["0", "4", "rollout"] and line_of(text, 0)[-5:-2] == ["12", "5", "340"]
    assert line_of(text, 1)[:3] == ["1", "4", "idle"]
    for log in logs:
        log.close()


def test_the_last_steps_and_what_they_waited(tmp_path):
    folder = write_run(tmp_path / "r", ranks=2, steps=11)
    text = drawn(folder)
    assert "step 11 of 11" in text and "finished" in text and "ended: 2" in text
    assert "held-out accuracy after step  0: 0.500  11: 0.700" in text
    steps = [line.split()[0] for line in text.splitlines() if "0." in line and line.split()[0].isdigit()]
    assert steps[:8] == [str(step) for step in range(4, 12)]
    assert all(len(line) <= 80 for line in text.splitlines())


def test_watching_ends_with_the_run_and_once_prints_once(tmp_path):
    folder = write_run(tmp_path / "r")
    for once in (True, False):
        console = Console(file=io.StringIO(), width=80)
        watch(folder, once=once, every=0.01, console=console)
        assert "finished" in console.file.getvalue()
