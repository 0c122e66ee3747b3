"""One job to a run directory: living and dead owners here and elsewhere, file systems without flock."""

from __future__ import annotations

import errno
import fcntl
import json
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.errors import RunDirectoryError
from megatron_tlt.resilience.heartbeat import Heartbeat, StatusFiles, write_status
from megatron_tlt.resilience.run_lock import LOCK, RunLock

HOLDER = (
    "import sys, time; from megatron_tlt.resilience.run_lock import RunLock; "
    "lock = RunLock(sys.argv[1]); lock.acquire(); print('held', flush=True); time.sleep(600)"
)
NODE7 = {"name": "process 4242 on node7, job 17", "machine": "another-kernel", "token": "x"}
BEAT = Heartbeat("a", 0, 1, "node7", 4242, heartbeat_s=0.05)


def lock_of(run_dir: Path) -> RunLock:
    return RunLock(run_dir, settle_s=0.05)


def beat(run_dir: Path, **changes: Any) -> None:
    write_status(StatusFiles(run_dir).heartbeat(0), replace(BEAT, **changes))


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A run directory with the lock and the heartbeat of a job on another machine."""
    StatusFiles(tmp_path).clear()
    (tmp_path / LOCK).write_text(json.dumps(NODE7))
    beat(tmp_path)
    return tmp_path


@contextmanager
def beating(run_dir: Path) -> Iterator[None]:
    """The job on the other machine is alive."""
    stop = threading.Event()

    def go_on() -> None:
        number = 0
        while not stop.wait(BEAT.heartbeat_s):
            number += 1
            beat(run_dir, seq=number)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_a_second_job_is_refused_by_name_until_the_first_is_dead(tmp_path: Path) -> None:
    StatusFiles(tmp_path).clear()
    beat(tmp_path)  # as a killed job leaves it
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        for number in (signal.SIGSTOP, signal.SIGKILL):
            with pytest.raises(RunDirectoryError, match=f"in use by process {process.pid} on "):
                lock_of(tmp_path).acquire()
            process.send_signal(number)
    started = time.monotonic()
    for _ in range(2):
        lock = lock_of(tmp_path)
        lock.acquire()
        lock.check()
        lock.release()
        lock.release()
        beat(tmp_path, outcome="done")
    assert time.monotonic() - started < 1.0  # it does not wait for heartbeats on the same machine
    assert stat.S_IMODE((tmp_path / LOCK).stat().st_mode) == 0o600


@pytest.mark.parametrize("has_flock", [True, False])
def test_a_job_on_another_machine_is_replaced_only_if_its_heartbeats_have_ended(
    elsewhere: Path, has_flock: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_flock:
        no_flock(monkeypatch)
    with beating(elsewhere), pytest.raises(RunDirectoryError, match="process 4242 on node7, job 17"):
        lock_of(elsewhere).acquire()
    started = time.monotonic()
    lock = lock_of(elsewhere)
    lock.acquire()
    assert time.monotonic() - started >= 4 * BEAT.heartbeat_s
    lock.check()
    lock.release()


def test_a_removed_lock_file_does_not_hide_a_living_job(elsewhere: Path) -> None:
    (elsewhere / LOCK).unlink()
    with beating(elsewhere), pytest.raises(RunDirectoryError, match="a job on node7"):
        lock_of(elsewhere).acquire()


def test_a_job_that_was_replaced_finds_out_and_leaves_the_new_owners_file(tmp_path: Path) -> None:
    lock = lock_of(tmp_path)
    lock.acquire()
    (tmp_path / LOCK).write_text(json.dumps(NODE7))
    with pytest.raises(RunDirectoryError, match="taken over by process 4242 on node7"):
        lock.check()
    lock.release()
    assert json.loads((tmp_path / LOCK).read_text()) == NODE7


def test_of_two_jobs_that_find_the_same_dead_owner_one_stays(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat(elsewhere, outcome="killed")
    settle_s, sleep = 0.25, time.sleep

    def write_as_the_other_job(seconds: float) -> None:
        if seconds == settle_s:
            (elsewhere / LOCK).write_text(json.dumps({**NODE7, "token": "y"}))
        else:
            sleep(seconds)

    monkeypatch.setattr(time, "sleep", write_as_the_other_job)
    with pytest.raises(RunDirectoryError, match="taken over"):
        RunLock(elsewhere, settle_s=settle_s).acquire()


@pytest.mark.parametrize("junk", ["", "{", "[1]", "\x00" * 512])
def test_a_torn_or_foreign_file_has_no_owner(tmp_path: Path, junk: str) -> None:
    (tmp_path / LOCK).write_text(junk)
    lock = lock_of(tmp_path)
    lock.acquire()
    lock.release()
