"""A rank's status file: what is written when, and how it ends. The clock is a number."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_tlt.resilience.heartbeat import Heartbeat, phase_limit
from megatron_tlt.resilience.status_files import JobEnd, RankStatus, StatusFiles
from megatron_tlt.resilience.watchdog import Watchdog, WatchdogOptions


class Rank:
    """A heartbeat whose clock is `now`, and which notes its sleeps."""

    def __init__(self, run_dir: Path):
        self.now = 0.0
        self.slept: list[float] = []
        self.files = StatusFiles(run_dir)
        self.files.clear()
        status = RankStatus("a", 0, 2, "n0", os.getpid(), heartbeat_s=5.0)
        self.heartbeat = Heartbeat(run_dir, status, lambda: self.now, self.slept.append)

    @property
    def written(self) -> RankStatus:
        status = self.files.read_rank(0)
        assert status is not None
        return status


@contextmanager
def rank_in(run_dir: Path) -> Iterator[Rank]:
    rank = Rank(run_dir)
    try:
        yield rank
    finally:
        rank.heartbeat.close("done")


def test_phases_and_states_are_written_at_once_and_progress_each_heartbeat(tmp_path: Path) -> None:
    with rank_in(tmp_path) as rank:
        rank.heartbeat.enter("rollout", 4)
        assert (rank.written.phase, rank.written.step, rank.written.outcome) == ("rollout", 4, "running")
        rank.heartbeat.report(state="BUSY", running=3, queued=2, longest=17, left=5.5)
        seen = rank.written
        assert (seen.state, seen.running, seen.queued, seen.longest, seen.left) == ("BUSY", 3, 2, 17, 5.5)
        for rank.now, running in ((4.9, 3), (5.0, 1)):
            rank.heartbeat.report(state="BUSY", running=1)
            assert rank.written.running == running
        rank.heartbeat.enter("score", 4)
        assert (rank.written.state, rank.written.running) == ("", 0)
    assert rank.written.outcome == "done"


def test_a_phase_has_a_limit_from_its_third_time_on_that_no_outlier_moves(tmp_path: Path) -> None:
    assert phase_limit([100.0] * 2) == 0.0
    assert phase_limit([1.0] * 3) == 30.0
    assert phase_limit([100.0] * 5 + [9000.0]) == 300.0
    with rank_in(tmp_path) as rank:
        limits = []
        for _ in range(4):
            for phase, seconds in (("rollout", 20.0), ("score", 1.0)):
                rank.heartbeat.enter(phase, 1)
                limits.append(rank.written.limit_seconds)
                rank.now += seconds
        assert limits == [0, 0, 0, 0, 0, 0, 60, 30]


@pytest.mark.parametrize(
    ("outcome", "known", "reason", "ranks", "slept"),
    [
        ("failed", None, "failed", [0], [0.5]),
        ("timeout", None, "hung", [1], [0.5, 120.0]),
        ("failed", JobEnd("a", "killed", "rank 1 was killed", [1]), "killed", [1], [0.5]),
        ("timeout", JobEnd("a", "killed", "rank 1 was killed", [1]), "killed", [1], [0.5]),
    ],
)
def test_an_error_becomes_the_reason_unless_there_is_one(
    tmp_path: Path, outcome: str, known: JobEnd | None, reason: str, ranks: list[int], slept: list[float]
) -> None:
    """A rank that waited for another one stays until it is killed: its stack is to be written."""
    with rank_in(tmp_path) as rank:
        if known is not None:
            assert rank.files.claim_end(known)
        rank.heartbeat.close(outcome, "it broke", [1])  # type: ignore[arg-type]
    end = rank.files.read_end("a")
    assert end is not None and (end.outcome, end.ranks) == (reason, ranks)
    assert end.text == ("it broke" if known is None else known.text)
    assert rank.slept == slept
    written = ("failed", "it broke") if known is None else ("running", "")
    assert (rank.written.outcome, rank.written.detail) == written, "files stay as they were when the job ended"


def test_a_disk_that_takes_nothing_costs_one_warning_and_the_rank_still_shows_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with rank_in(tmp_path) as rank, caplog.at_level(logging.WARNING):
        os.utime(rank.files.rank(0), (1.0, 1.0))
        monkeypatch.setattr(os, "pwrite", full)
        for phase in ("rollout", "score"):
            rank.heartbeat.enter(phase, 1)
        assert [record.getMessage() for record in caplog.records] == [
            "the status file cannot be written: [Errno 28] No space left on device"
        ]
        assert rank.files.rank(0).stat().st_mtime > 1.0


def test_a_file_system_that_fails_for_a_moment_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(*_: object, **__: object) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle")

    with rank_in(tmp_path) as rank:
        for name in ("exists", "is_dir", "read_bytes"):
            monkeypatch.setattr(Path, name, stale)
        rank.heartbeat.enter("rollout", 1)
        assert rank.files.read_end("a") is None, "which the watchdog asks for"
        watchdog = Watchdog(WatchdogOptions(str(tmp_path / "other"), "a", 1, {0: os.getpid()}, 10.0))
        watchdog._died(0)
        assert watchdog._end is not None and watchdog._end.outcome == "killed", "the rank is named all the same"
        monkeypatch.undo()
