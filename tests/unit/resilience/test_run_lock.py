"""One job to a run directory."""

from __future__ import annotations

import errno
import fcntl
import logging
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_tlt.errors import ConfigError
from megatron_tlt.resilience import run_lock
from megatron_tlt.resilience.run_lock import RunLock, lock_run_dir


def rank_of(is_main: bool, owner: str = "", others: tuple[str, ...] = (), **more: Any) -> Any:
    """One rank's world; `owner`: the text of rank 0's lock, `others`: hosts of other ranks that do not find it."""
    return SimpleNamespace(
        is_main=is_main, barrier=lambda: None, broadcast_object=lambda mine: mine if is_main else ("", owner),
        wait_for_all=lambda: None, all_gather_object=lambda mine: [mine, *others],
        **{"at_refusal": lambda undo: None, **more},
    )  # fmt: skip


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
    world = rank_of(True, at_refusal=undo.append)
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
    (tmp_path / "run").mkdir()
    owner = (lock := RunLock(tmp_path / "run")).acquire()
    monkeypatch.setattr(run_lock, "_take_back", lambda run_dir: pytest.fail("looks"))
    assert lock_run_dir("train.run_dir", "", tmp_path / "run", rank_of(False, owner)) is None
    lock.release()


@pytest.mark.parametrize("stale", [None, "process 7 on another-host"])
def test_a_host_that_sees_the_lock_late_is_waited_for(tmp_path, stale):
    """A client of a network file system may show a directory as it was up to a minute ago."""
    owner, waits = "process 7 on the-first-host", []
    if stale is not None:
        (tmp_path / "lock").write_text(stale)

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 30:
            (tmp_path / "lock").write_text(owner)

    assert lock_run_dir("train.run_dir", "run", tmp_path, rank_of(False, owner), sleep) is None
    assert len(waits) == sum(waits) == 30


@pytest.mark.parametrize("stale", [None, "process 7 on another-host"])
def test_hosts_with_a_run_directory_each_are_refused(tmp_path, stale):
    """A disk of each host's own, new or of an earlier run there. The host with rank 0 refuses, too."""
    if stale is not None:
        (tmp_path / "lock").write_text(stale)
    words = r"train\.run_dir = 'run': is not on a disk that all hosts share: rank 0's file `lock` is not there on "
    with pytest.raises(ConfigError, match=words + socket.gethostname()):
        lock_run_dir("train.run_dir", "run", tmp_path, rank_of(False, "process 7 on the-first-host"), lambda _: None)
    with pytest.raises(ConfigError, match=words + "b, c"):
        lock_run_dir("train.run_dir", "run", tmp_path / "own", rank_of(True, others=("c", "b", "c")))
