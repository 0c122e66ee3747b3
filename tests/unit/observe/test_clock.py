"""Wall time that cannot jump, and no module that reads another clock."""

from __future__ import annotations

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "megatron_tlt"


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
