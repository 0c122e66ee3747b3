"""One job to a run directory."""

from __future__ import annotations

import errno
import fcntl
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_tlt.resilience import run_lock
from megatron_tlt.resilience.run_lock import RunLock, lock_run_dir


def test_a_file_system_without_flock_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock = RunLock(tmp_path)
    with caplog.at_level(logging.WARNING):
        lock.acquire()
    lock.release()
    assert "cannot be locked (no locks here)" in caplog.text


def test_a_refused_start_takes_back_what_it_made(tmp_path):
    """All of a new directory; of an older one what it did not have, and never anything but a start's own files."""
    undo: list = []
    world = SimpleNamespace(is_main=True, barrier=lambda: None, broadcast_object=lambda v: v, at_refusal=undo.append)
    new, old = tmp_path / "a/b/unfinished", tmp_path / "run"
    (old / "status").mkdir(parents=True)
    for place in (new, old):
        lock_run_dir("train.run_dir", str(place), place, world).release()
        (place / "stacks").mkdir()
    (old / "checkpoints").mkdir()
    for take_back in undo:
        take_back()
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == [
        "run", "run/checkpoints", "run/status",
    ]  # fmt: skip


def test_only_rank_0_looks_for_what_is_not_there_yet(tmp_path, monkeypatch):
    """A network file system remembers what it did not find, for the other ranks of that host, too."""
    world = SimpleNamespace(is_main=False, barrier=lambda: None, broadcast_object=lambda v: None)
    monkeypatch.setattr(run_lock, "_take_back", lambda run_dir: pytest.fail("looks"))
    assert lock_run_dir("train.run_dir", "", tmp_path / "run", world) is None
