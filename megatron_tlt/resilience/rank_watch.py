"""A rank's end of its watchdog: notes phases and signs of life in shared memory, and starts who reads it."""

from __future__ import annotations

import atexit
import faulthandler
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Literal

from megatron_tlt.config.watchdog import WatchdogSection
from megatron_tlt.resilience import heartbeat as block
from megatron_tlt.resilience import status_files as files
from megatron_tlt.resilience.deaths import alive_dir, hold_open
from megatron_tlt.resilience.hang_detector import limit_of
from megatron_tlt.resilience.processes import STACK_SIGNAL

Outcome = Literal["done", "saved", "left", "failed", "timeout"]

_BOOT = "import sys; sys.path.insert(0, sys.argv[2]); from megatron_tlt.resilience.watchdog import main; main()"
_KEPT = ("PATH", "LD_LIBRARY_PATH", "HOME", "LANG", "TMPDIR")
_HISTORY = 32
# The watchdog gathers all ranks' stacks after a timeout; otherwise it only writes two files.
_PATIENCE_S = {"done": 5.0, "saved": 5.0, "left": 5.0, "failed": 5.0, "timeout": 60.0}
_log = logging.getLogger(__name__)


class WatchdogClient:
    """One rank, watched. Call `enter` and `pulse` from the main thread; microseconds each, no file is touched."""

    def __init__(
        self,
        section: WatchdogSection,
        run_dir: str | Path,
        rank: int,
        size: int,
        attempt: str,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Starts the process. From now on `STACK_SIGNAL` makes this process write its stacks.

        `attempt` names this start of the job, the same on all ranks; rank 0 has called `files.begin_attempt`.
        """
        self._section, self._run_dir, self._clock = section, Path(run_dir), clock
        self._rank, self._size, self._attempt = rank, size, attempt
        self._durations: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_HISTORY))
        files.make_private(files.status_dir(run_dir))
        path = files.stacks_path(run_dir, rank)
        files.make_private(path.parent)
        files.make_private(alive_dir(run_dir))
        self._life = hold_open(run_dir, rank)
        self._stacks = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w")
        faulthandler.register(STACK_SIGNAL, file=self._stacks, all_threads=True, chain=False)
        if not faulthandler.is_enabled():
            faulthandler.enable()  # a segmentation fault says where
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the watch
        self._file.truncate(block.SIZE)
        self._block = block.Block(self._file.fileno())
        now = clock()
        self._snapshot = block.Snapshot(phase_at=now, pulse_at=now)
        self._block.write(self._snapshot)
        self._restarts = 3
        self._process: subprocess.Popen[bytes] | None = self._start()
        atexit.register(self.close, "left")  # an orderly end that nobody announced is no crash

    def enter(self, phase: str, step: int, order: int) -> None:
        """The rank enters a phase; `order` counts them."""
        now, old = self._clock(), self._snapshot
        if old.order:
            self._durations[old.phase].append(now - old.phase_at)
        section = self._section
        limit = limit_of(self._durations[phase], section.slow_factor, section.slow_min_s)
        self._put(
            block.Snapshot(order=order, step=step, phase=phase, phase_at=now, pulse_at=now, limit=limit)
        )
        self._mind_the_process()

    def pulse(
        self, *, state: str = "", running: int = 0, queued: int = 0, longest: int = 0, left: float = 0.0
    ) -> None:
        """A sign of life within a phase, with what there is to say; fields as in `block.Snapshot`."""
        self._put(
            replace(
                self._snapshot,
                pulse_at=self._clock(),
                state=state,
                running=running,
                queued=queued,
                longest=longest,
                left=left,
            )
        )

    def close(self, outcome: Outcome, detail: str = "") -> None:
        """Says how the rank ends, and waits until that is written. A second call does nothing.

        With "timeout" all ranks' stacks are gathered, after which this process is killed. Without this call the end
        of the process is taken for a crash.
        """
        process, self._process = self._process, None
        if process is None:
            return
        atexit.unregister(self.close)
        assert process.stdin is not None
        with suppress(OSError):  # it is gone
            process.stdin.write(json.dumps({"outcome": outcome, "detail": detail[:2000]}).encode() + b"\n")
            process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_S[outcome])
        faulthandler.unregister(STACK_SIGNAL)
        os.close(self._life)
        self._stacks.close()
        self._block.close()
        self._file.close()

    def _put(self, snapshot: block.Snapshot) -> None:
        self._snapshot = snapshot
        if self._process is not None:
            self._block.write(snapshot)

    def _start(self) -> subprocess.Popen[bytes]:
        fd = self._file.fileno()
        options = {
            "run_dir": str(self._run_dir.resolve()),
            "attempt": self._attempt,
            "rank": self._rank,
            "size": self._size,
            "pid": os.getpid(),
            "block_fd": fd,
            "heartbeat_s": self._section.heartbeat_s,
            "hang_s": self._section.hang_s,
        }
        root = str(Path(__file__).resolve().parents[2])
        return subprocess.Popen(
            # Without site and its packages: it needs none, and starts four times as fast.
            [sys.executable, "-I", "-S", "-c", _BOOT, json.dumps(options), root],
            stdin=subprocess.PIPE,
            stdout=2,
            pass_fds=[fd],
            # No launcher's variables: it is not a rank.
            env={name: value for name, value in os.environ.items() if name in _KEPT},
            start_new_session=True,  # launchers kill by process group, and it must outlive its rank for a moment
        )

    def _mind_the_process(self) -> None:
        """Starts a watchdog anew that has died."""
        if self._process is None or self._process.poll() is None or not self._restarts:
            return
        self._restarts -= 1
        _log.warning("the watchdog of this rank ended with %d; starting another", self._process.returncode)
        self._process = self._start()


def start_watch(
    section: WatchdogSection, run_dir: str | Path, rank: int, size: int, share: Callable[[str], str]
) -> WatchdogClient:
    """The watch of this rank. Collective: `share` hands every rank the value of rank 0."""
    if rank == 0:
        files.begin_attempt(run_dir)
    attempt = share(f"{time.time():.3f}-{os.getpid()}")
    return WatchdogClient(section, run_dir, rank, size, attempt)
