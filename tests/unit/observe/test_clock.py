"""Wall time that cannot jump, and no module that reads another clock."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from megatron_tlt.observe.clock import wall_seconds

PACKAGE = Path(__file__).parents[3] / "megatron_tlt"


def test_it_is_the_wall_clock_of_the_start_counted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    before = wall_seconds()
    assert abs(before - time.time()) < 3600  # unless the clock was set since this process started
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    later = [wall_seconds() for _ in range(1000)]
    assert later == sorted(later) and before <= later[0] and later[-1] < before + 60


# Who must compare times of several processes, or shows them to a person; nothing that a run computes depends on them.
# `data/hashing` compares a file's time with itself, to see that the file was written again.
READERS = {"observe/clock.py", "data/hashing.py"}


def test_nobody_else_reads_the_wall_clock() -> None:
    """Durations and order come from the monotonic clock; file times are the clock of another machine."""
    wall = re.compile(
        r"\btime\.(time|time_ns)\b|\bdatetime\.(now|utcnow|today)\b|\bst_[amc]time|getmtime|CLOCK_REALTIME"
    )
    readers = [
        f"{path.relative_to(PACKAGE)}:{number}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if wall.search(line)
    ]
    files = {reader.split(":")[0] for reader in readers}
    assert {file for file in files if not file.startswith("resilience/")} <= READERS, readers
