"""Writes finished answers from a thread, so that the engine never waits for a disk.

    engine    add(answer) ----> queue ----> thread: encode, write; fsync every `sync_seconds` and at a step's end
    main      remove(directory) -> queue -> thread: deletes what a checkpoint covers

A written record survives the process; one that was synced survives the machine. What is still in the queue when a
process is killed is lost, and generated again.
"""

from __future__ import annotations

import logging
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_tlt.resilience.rollout_cache_file import encode, encode_header
from megatron_tlt.types import Sample

_log = logging.getLogger(__name__)

PRIVATE_DIRECTORY, PRIVATE_FILE = 0o700, 0o600


class RolloutCacheWriter:
    """One writer of one process; its methods return at once. A disk error ends the banking, not the run."""

    def __init__(self, sync_seconds: float, max_bytes: int, fsync: Callable[[int], None] = os.fsync):
        """At most `max_bytes` are written into steps that nobody has removed; answers beyond are not kept."""
        self._sync_seconds, self._max_bytes, self._fsync = sync_seconds, max_bytes, fsync
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._fd, self._unsynced, self._synced_at = -1, False, 0.0
        self._path: Path | None = None
        self._key: Mapping[str, Any] = {}
        self._sizes: dict[Path, int] = {}  # bytes of this writer in each directory
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._work, name="rollout-bank", daemon=True)
        self._thread.start()

    def begin(self, path: Path, key: Mapping[str, Any]) -> None:
        """From now on answers go to `path`, which is made with the first of them."""
        self._queue.put(lambda: self._begin(path, key))

    def add(self, sample: Sample, prompt_crc: int) -> None:
        """Keeps a finished answer, which nobody changes any more."""
        self._queue.put(lambda: self._append(encode(sample, prompt_crc)))

    def end(self) -> None:
        """The step's last answer is there: syncs and closes the file."""
        self._queue.put(self._close)

    def remove(self, directory: Path) -> None:
        """Deletes a directory with all that is in it."""
        self._queue.put(lambda: self._remove(directory))

    def flush(self) -> None:
        """Waits until everything asked for is done (tests, and the run's end)."""
        done = threading.Event()
        self._queue.put(done.set)
        while not done.wait(1.0) and self._thread.is_alive():
            pass

    def close(self) -> None:
        """Does what was asked for and ends. Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    # -- the thread -------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            try:
                task = self._queue.get(timeout=self._sync_seconds if self._unsynced else None)
            except queue.Empty:
                task = self._sync
            if task is None:
                break
            self._try(task)
            if self._unsynced and time.monotonic() - self._synced_at >= self._sync_seconds:
                self._try(self._sync)
        self._try(self._close)

    def _try(self, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception as error:  # noqa: BLE001  a help must not hang the run at its end
            self.failure = f"{type(error).__name__}: {error}"
            _log.warning("the rollout bank is off, a restart will answer again: %s", error)
            if self._fd >= 0:
                os.close(self._fd)
            self._fd, self._path, self._unsynced = -1, None, False

    def _begin(self, path: Path, key: Mapping[str, Any]) -> None:
        self._close()
        self._path, self._key = path, key

    def _append(self, record: bytes) -> None:
        if self._path is None or self.failure is not None:
            return
        if self._fd < 0:
            self._open(self._path)
        if self._path is not None:  # else there was no room for the header
            self._write(record)

    def _open(self, path: Path) -> None:
        for directory in (path.parent.parent, path.parent):  # `parents` would not be private
            directory.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._fd = os.open(path, flags, PRIVATE_FILE)
        self._synced_at = time.monotonic()
        self._write(encode_header(self._key))

    def _write(self, data: bytes) -> None:
        assert self._path is not None
        if sum(self._sizes.values()) + len(data) > self._max_bytes:
            # Rank 0 removes what is covered, for all writers: only now it matters to know what.
            self._sizes = {folder: size for folder, size in self._sizes.items() if folder.exists()}
        if sum(self._sizes.values()) + len(data) > self._max_bytes:
            self._path = None  # until the next step
            return
        self._sizes[self._path.parent] = self._sizes.get(self._path.parent, 0) + len(data)
        while data:
            data = data[os.write(self._fd, data) :]
        self._unsynced = True

    def _sync(self) -> None:
        if self._fd >= 0 and self._unsynced:
            self._fsync(self._fd)
        self._unsynced, self._synced_at = False, time.monotonic()

    def _close(self) -> None:
        self._sync()
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _remove(self, directory: Path) -> None:
        self._sizes.pop(directory, None)
        shutil.rmtree(directory, ignore_errors=True)
