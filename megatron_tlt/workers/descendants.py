"""The processes below a worker, also those in sessions of their own and those whose parents have ended. Linux only.

`keep` puts a process between a rank and its worker: Linux gives it the orphans below the worker, and it ends them with
the worker, however that ends.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_RANK_DIED = signal.SIGHUP  # of a keeper's parent: a process without a terminal gets no other one
_KILL_S = 2.0  # in which killed processes must have ended
_FAILED = 1


class Process(NamedTuple):
    """A line of the process table."""

    pid: int
    session: int


def descendants(ancestor: int) -> list[Process]:
    """The processes below `ancestor` that have not ended; none where there is no /proc."""
    children: dict[int, list[Process]] = {}
    with suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):  # it has ended meanwhile
                state, parent, _, session = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[:4]
                if state not in "ZX":
                    children.setdefault(int(parent), []).append(Process(int(name), int(session)))
    found = children.get(ancestor, [])[:]
    for process in found:  # grows meanwhile
        found += children.get(process.pid, [])
    return found


def end_descendants(ancestor: int, is_meant: Callable[[Process], bool] = lambda process: True) -> None:
    """Kills the meant processes below `ancestor`, also those that they start meanwhile."""
    end = time.monotonic() + _KILL_S
    while (meant := [*filter(is_meant, descendants(ancestor))]) and time.monotonic() < end:
        for process in meant:
            with suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.002)


@contextmanager
def sessions_ended() -> Iterator[None]:
    """Around a call of a user's code: what it begins in sessions of their own ends with it."""
    started = Started()
    try:
        with started.noted():
            yield
    finally:
        started.end_sessions()


class Started:
    """The processes that were started during some calls of a user's code, found by their ids: Linux counts them up."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []  # last ids before and after a call

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Around a call."""
        before = _last_pid()
        try:
            yield
        finally:
            if (after := _last_pid()) != before:
                self._spans.append((before, after))

    def end_sessions(self) -> None:
        """Kills what runs in sessions that were begun during the calls. Sessions of later processes stay."""
        if any(self._has(_session(pid)) for span in self._spans for pid in _ids(*span)):
            end_descendants(os.getppid(), lambda process: self._has(process.session))

    def _has(self, session: int) -> bool:
        """Whether it is such a session, and not the worker's, whose id may be among them when the count begins anew."""
        return session != os.getsid(0) and any(session in _ids(*span) for span in self._spans)


def _ids(before: int, after: int) -> range:
    """The ids that were given between two calls of `_last_pid`; none where the count began anew between them."""
    return range(before + 1, after + 1)


def _last_pid() -> int:
    """The id that Linux gave last to a process or thread; 0 where it does not say."""
    with suppress(OSError):
        return int(Path("/proc/loadavg").read_text().split()[-1])
    return 0


def _session(pid: int) -> int:
    """The session of a process; 0 if it has ended."""
    with suppress(OSError):
        return os.getsid(pid)
    return 0


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Has Linux send this process a signal when its parent dies, so that a hung function does not outlive a rank."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before prctl
        os._exit(_FAILED)


def keep(rank: int) -> None:
    """Forks: returns in the child, the worker. The parent waits, ends what the worker leaves, and ends as it did.

    Call it in a process with one thread that `rank` has started.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    keeper = os.getpid()
    worker = os.fork()
    if worker == 0:
        die_with(keeper)
        return
    try:
        signal.signal(_RANK_DIED, _raise)
        die_with(rank, _RANK_DIED)
        ended, status = os.wait()
        while ended != worker:  # orphans
            ended, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
    except BaseException:  # noqa: BLE001  the rank has died, and this is not its program
        code = _FAILED
    signal.signal(_RANK_DIED, signal.SIG_IGN)
    end_descendants(keeper)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker has left its own
        with suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(keeper, -code)
    os._exit(code if code >= 0 else _FAILED)


def _raise(number: int, frame: FrameType | None) -> None:
    raise SystemExit
