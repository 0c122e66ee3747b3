"""What the kernel says about a rank's process, and asking it for its stacks. Where there is no /proc less is known."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

STACK_SIGNAL = signal.SIGQUIT
_PATIENCE_S = 5.0
_QUIET_S = 0.2


def process_state(pid: int) -> str:
    """The kernel's letter for a process: R, S, D, T, Z; ? where it does not say."""
    parts = _stat(pid)
    return parts[0] if parts else "?"


def exit_status(pid: int) -> str:
    """How a process ended that nobody has reaped yet, in words; empty where the kernel does not say."""
    parts = _stat(pid)
    if len(parts) < 50 or parts[0] not in "ZX":
        return ""
    code = int(parts[49])
    if code & 0x7F:
        with suppress(ValueError):
            return f"was killed by signal {code & 0x7F} ({signal.Signals(code & 0x7F).name})"
        return f"was killed by signal {code & 0x7F}"
    return f"left with exit code {code >> 8}, without a word"


def _stat(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the name before it may hold anything


def oom_kills() -> int:
    """Processes that the kernel has killed for memory in this control group; 0 where it does not say."""
    try:
        group = Path("/proc/self/cgroup").read_text().split("::", 1)[1].splitlines()[0]
        events = (Path("/sys/fs/cgroup") / group.lstrip("/") / "memory.events").read_text()
        return int(dict(line.split() for line in events.splitlines())["oom_kill"])
    except (OSError, IndexError, KeyError, ValueError):
        return 0


def ask_for_stacks(pid: int, path: Path, heading: str, alive: Callable[[], bool]) -> bool:
    """Has a rank that registered `STACK_SIGNAL` append its stacks to `path`; whether they came within seconds.

    The handler is C and needs no GIL, so it works in a rank that spins in C or waits inside MPI. A stopped process is
    let go on, finds the signal first, and is stopped again.
    """
    with path.open("a", encoding="utf-8") as file:
        file.write(f"\n==== {heading}\n")
    before = path.stat().st_size
    if not alive():
        return False
    was_stopped = process_state(pid) in ("T", "t")
    os.kill(pid, STACK_SIGNAL)
    if was_stopped:
        os.kill(pid, signal.SIGCONT)
    came = _grows(path, before)
    if was_stopped and alive():
        os.kill(pid, signal.SIGSTOP)
    return came


def _grows(path: Path, before: int) -> bool:
    """Waits until a file has become longer and rests; False if it does not within seconds."""
    size, since, end = before, time.monotonic(), time.monotonic() + _PATIENCE_S
    while time.monotonic() < end:
        time.sleep(0.01)
        now = path.stat().st_size
        if now != size:
            size, since = now, time.monotonic()
        elif size > before and time.monotonic() - since > _QUIET_S:
            return True
    return size > before
