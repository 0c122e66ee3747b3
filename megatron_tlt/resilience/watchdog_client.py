"""A rank's side of its host's watchdog: reports phases and signs of life through a Unix socket."""

from __future__ import annotations

import atexit
import faulthandler
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.resilience.hang_detector import phase_limit
from megatron_tlt.resilience.heartbeat import StatusFiles
from megatron_tlt.resilience.processes import ALL_STACKS_SIGNAL, STACK_SIGNAL
from megatron_tlt.resilience.watchdog import Options

if TYPE_CHECKING:
    from megatron_tlt.config.run import WatchdogSection
    from megatron_tlt.distributed.world import World
    from megatron_tlt.interfaces import RankOutcome

_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[2]); from megatron_tlt.resilience.watchdog import main; main()"
)
_ENVIRONMENT = "PATH", "LD_LIBRARY_PATH", "HOME", "LANG", "TMPDIR"  # no launcher's: it is not a rank
_HISTORY = 32  # durations of a phase that its limit is computed from
_CLOSE_S, _STACKS_S = 5.0, 60.0  # for the watchdog at a rank's end: to write a file, or all ranks' stacks
_log = logging.getLogger(__name__)


class WatchdogClient:
    """One watched rank. `enter` and `report` take microseconds and touch no file; the main thread calls them."""

    def __init__(
        self,
        section: WatchdogSection,
        run_dir: str | Path,
        rank: int,
        address: str,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Connects to the watchdog at `address`. From now on two signals make this process write its stacks."""
        self._section, self._clock = section, clock
        self._durations: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_HISTORY))
        path = StatusFiles(run_dir).stacks_of(rank)
        self._stacks = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w")
        faulthandler.register(STACK_SIGNAL, file=self._stacks, all_threads=False)
        faulthandler.register(ALL_STACKS_SIGNAL, file=self._stacks, all_threads=True)
        if not faulthandler.is_enabled():
            faulthandler.enable()  # a segmentation fault writes where it was
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(address)
        now = clock()
        self._state: dict[str, Any] = {"rank": rank, "pid": os.getpid(), "phase_at": now, "order": 0}
        self._is_open = True
        self._send(now)
        atexit.register(self.close, "left")  # an exit without `close` is not a crash

    def enter(self, phase: str, step: int, order: int) -> None:
        """The rank enters a phase, the `order`-th of all."""
        now, old = self._clock(), self._state
        if old["order"]:
            self._durations[old["phase"]].append(now - old["phase_at"])
        section = self._section
        limit = phase_limit(self._durations[phase], section.slow_factor, section.slow_min_s)
        self._state = {"phase": phase, "step": step, "order": order, "phase_at": now, "limit": limit}
        self._send(now)

    def report(
        self, *, state: str = "", running: int = 0, queued: int = 0, longest: int = 0, left: float = 0.0
    ) -> None:
        """A sign of life within a phase, with fields of `Heartbeat`. Only a few each heartbeat interval are sent."""
        now, is_news = self._clock(), state != self._state.get("state", "")
        fields = {"state": state, "running": running, "queued": queued, "longest": longest, "left": left}
        self._state |= fields
        if is_news or now - self._sent_at >= min(1.0, self._section.heartbeat_s / 4):
            self._send(now)

    def close(self, outcome: RankOutcome, detail: str = "") -> None:
        """The rank ends; returns when that is written. A second call does nothing.

        With "timeout" all ranks' stacks are gathered, after which this process is killed. A process that ends without
        this call, and not through Python's exit, is taken for killed.
        """
        if not self._is_open:
            return
        self._is_open = False
        atexit.unregister(self.close)
        self._socket.settimeout(_STACKS_S if outcome == "timeout" else _CLOSE_S)
        with suppress(OSError):  # the watchdog is gone, or too slow
            self._socket.send(json.dumps({"outcome": outcome, "detail": detail[:2000]}).encode())
            while self._socket.recv(1):
                pass
        for number in (STACK_SIGNAL, ALL_STACKS_SIGNAL):
            faulthandler.unregister(number)
        self._socket.close()
        self._stacks.close()

    def _send(self, now: float) -> None:
        self._sent_at = now
        if self._is_open:
            with suppress(OSError):  # the watchdog is gone, or stopped and its queue full
                self._socket.send(json.dumps(self._state | {"alive_at": now}).encode(), socket.MSG_DONTWAIT)


def start_watchdog(section: WatchdogSection, run_dir: str | Path, world: World) -> WatchdogClient:
    """The watchdog of this host, started by the host's first rank, and this rank's connection to it. Collective."""
    if world.is_main:
        StatusFiles(run_dir).clear()
    start_id = world.broadcast_object(f"{time.time():.3f}-{os.getpid()}")
    host = socket.gethostname()
    first = world.all_gather_object(host).index(host)
    address = None
    if world.rank == first:
        options = Options(
            str(Path(run_dir).resolve()), start_id, world.size, section.heartbeat_s, section.hang_s
        )
        address = launch(options)
    return WatchdogClient(section, run_dir, world.rank, world.all_gather_object(address)[first])


def launch(options: Options) -> str:
    """Starts a watchdog process; returns the address it listens at: abstract, so that no file is left behind."""
    address = f"\0megatron-tlt-{os.urandom(8).hex()}"
    root = str(Path(__file__).resolve().parents[2])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(1024)
        subprocess.Popen(
            # Without site and its packages: it needs none, and starts four times as fast.
            [sys.executable, "-I", "-S", "-c", _BOOT, json.dumps(asdict(options)), root],
            stdin=listener.fileno(),
            stdout=2,
            env={name: value for name, value in os.environ.items() if name in _ENVIRONMENT},
            start_new_session=True,  # launchers kill by process group, and it must outlive its ranks for a moment
        )
    return address
