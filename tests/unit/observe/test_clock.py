"""Wall time that cannot jump; ruff (TID251) holds that no other module reads a wall clock."""

from __future__ import annotations

import time

import pytest

from megatron_tlt.observe.clock import wall_seconds


def test_it_is_the_wall_clock_of_the_start_counted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    before = wall_seconds()
    assert abs(before - time.time()) < 3600  # unless the clock was set since this process started
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    later = [wall_seconds() for _ in range(1000)]
    assert later == sorted(later) and before <= later[0] and later[-1] < before + 60
