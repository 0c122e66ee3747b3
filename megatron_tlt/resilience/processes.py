"""Processes by their entries in /proc, where there is one, and a signal that has one write its stacks. Stdlib only."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

STACK_SIGNAL = signal.SIGQUIT  # writes the main thread's stack; sent by people
ALL_STACKS_SIGNAL = signal.SIGRTMIN  # every thread's: it reads frames that change meanwhile, and may crash the process
_QUIET_S = 0.2  # without another byte: the stacks are whole
_LOOKS = 25  # at most, so far apart, at the stacks of a process that is to write them


def process_state(pid: int) -> str:
    """The kernel's letter for a process: R, S, D, T, Z; ? where there is no such process."""
    parts = _stat(pid)
    return parts[0] if parts else "?"


def is_alive(pid: int) -> bool:
    """Whether a process has not ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return process_state(pid) not in ("Z", "X")


def exit_status(pid: int) -> str:
    """How a process ended whose parent has not read its status yet, in words; empty where the kernel does not say."""
    parts = _stat(pid)
    if len(parts) < 50 or parts[0] not in "ZX":
        return ""
    code = int(parts[49])
    if number := code & 0x7F:
        return f"was killed by signal {number} ({signal.Signals(number).name})"
    return f"left with exit code {code >> 8}, without an error message"


def _stat(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the process name before it may hold anything


def write_stacks(files: Mapping[int, Path], headings: Mapping[int, str]) -> set[int]:
    """Has processes (by pid) append all threads' stacks to files; returns those that did so in time. Raises OSError.

    They have registered the signal with `faulthandler`: its handler is C and needs no GIL, so it works in a process
    that spins in C or waits inside MPI. A stopped process is continued, gets the signal first, and is stopped again.
    """
    sizes: dict[int, int] = {}
    stopped = [pid for pid in files if process_state(pid) in ("T", "t")]
    for pid, path in files.items():
        with path.open("a", encoding="utf-8") as file:
            file.write(f"\n==== {headings[pid]}\n")
        sizes[pid] = path.stat().st_size
        with suppress(ProcessLookupError):
            os.kill(pid, ALL_STACKS_SIGNAL)
            if pid in stopped:
                os.kill(pid, signal.SIGCONT)
    seen = sizes
    for _ in range(_LOOKS):
        time.sleep(_QUIET_S)
        before, seen = seen, {pid: path.stat().st_size for pid, path in files.items()}
        if seen == before and all(seen[pid] > sizes[pid] or not is_alive(pid) for pid in files):
            break
    for pid in stopped:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    return {pid for pid in files if seen[pid] > sizes[pid]}
