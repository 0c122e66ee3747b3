"""One job to a run directory: real processes, dead owners here and elsewhere, file systems without flock."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.errors import RunDirectoryError
from megatron_tlt.resilience.run_lock import LOCK, Owner, RunLock

BEAT = 0.05
HOLDER = (
    "import sys, time; from megatron_tlt.resilience.run_lock import RunLock; "
    "lock = RunLock(sys.argv[1]); lock.acquire(); print('held', flush=True); time.sleep(600)"
)
ELSEWHERE = Owner("node7", "another-kernel", 4242, "17", "token-of-node7")


@contextmanager
def holder(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A real process that holds the lock."""
    command = [sys.executable, "-c", HOLDER, str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def write(run_dir: Path, owner: Owner) -> None:
    (run_dir / LOCK).write_text(json.dumps(asdict(owner)).ljust(512))


def test_a_second_job_is_refused_by_name_and_a_killed_one_is_in_nobodys_way(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        with pytest.raises(RunDirectoryError, match=f"in use by process {process.pid} on "):
            RunLock(tmp_path).acquire()
        process.send_signal(signal.SIGKILL)
        process.wait()
        started = time.monotonic()
        lock = RunLock(tmp_path)
        lock.acquire()
        assert time.monotonic() - started < 1.0  # it does not wait for beats on the same machine
        assert stat.S_IMODE((tmp_path / LOCK).stat().st_mode) == 0o600
        lock.release()
        lock.release()


def test_a_stopped_job_still_holds_it(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(RunDirectoryError):
            RunLock(tmp_path, BEAT).acquire()


def test_released_and_taken_again(tmp_path: Path) -> None:
    for _ in range(3):
        lock = RunLock(tmp_path)
        lock.acquire()
        lock.check()
        with pytest.raises(RunDirectoryError):
            RunLock(tmp_path).acquire()
        lock.release()


def test_a_dead_owner_on_another_machine_is_waited_for_and_then_replaced(tmp_path: Path) -> None:
    write(tmp_path, ELSEWHERE)
    lock = RunLock(tmp_path, BEAT)
    started = time.monotonic()
    lock.acquire()
    assert time.monotonic() - started >= 5 * BEAT
    lock.check()
    lock.release()


def beat_elsewhere(run_dir: Path, stop: threading.Event) -> threading.Thread:
    """A living owner on another machine, on a file system whose flock ends at the machine."""

    def beat() -> None:
        number = 0
        while not stop.wait(BEAT):
            number += 1
            write(run_dir, replace(ELSEWHERE, beat=number))

    thread = threading.Thread(target=beat)
    thread.start()
    return thread


@pytest.mark.parametrize("has_flock", [True, False])
def test_a_living_owner_on_another_machine_is_not_replaced(
    tmp_path: Path, has_flock: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_flock:
        no_flock(monkeypatch)
    write(tmp_path, ELSEWHERE)
    stop = threading.Event()
    thread = beat_elsewhere(tmp_path, stop)
    try:
        with pytest.raises(RunDirectoryError, match="process 4242 on node7, job 17"):
            RunLock(tmp_path, BEAT).acquire()
    finally:
        stop.set()
        thread.join()


def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_without_flock_beats_alone_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_flock(monkeypatch)
    first = RunLock(tmp_path, BEAT)
    first.acquire()
    with pytest.raises(RunDirectoryError):
        RunLock(tmp_path, BEAT).acquire()
    first.release()
    second = RunLock(tmp_path, BEAT)
    second.acquire()
    second.release()


def test_who_was_thought_dead_and_replaced_is_told(tmp_path: Path) -> None:
    lock = RunLock(tmp_path, BEAT)
    lock.acquire()
    write(tmp_path, ELSEWHERE)
    eventually(lambda: raises(lock.check, "taken over by process 4242 on node7"))
    lock.release()
    assert json.loads((tmp_path / LOCK).read_text())["host"] == "node7"  # the new owner's file is left alone


def test_a_removed_file_is_made_again(tmp_path: Path) -> None:
    lock = RunLock(tmp_path, BEAT)
    lock.acquire()
    (tmp_path / LOCK).unlink()
    eventually(lambda: (tmp_path / LOCK).exists() and bool((tmp_path / LOCK).read_text().strip()))
    lock.check()
    with pytest.raises(RunDirectoryError, match=f"process {os.getpid()}"):
        RunLock(tmp_path, BEAT).acquire()
    lock.release()


@pytest.mark.parametrize("junk", ["", "{", "[1]", '{"host": 1}', "\x00" * 512])
def test_a_torn_or_foreign_file_is_nobodys(tmp_path: Path, junk: str) -> None:
    (tmp_path / LOCK).write_text(junk)
    lock = RunLock(tmp_path, BEAT)
    lock.acquire()
    lock.release()


def raises(call: Any, text: str) -> bool:
    try:
        call()
    except RunDirectoryError as error:
        return text in str(error)
    return False


def eventually(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(BEAT / 5)
