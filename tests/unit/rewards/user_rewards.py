"""Functions a user might write, good and bad. The response names the behaviour."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

NOT_A_FUNCTION = 3


def good(prompt: str, answer: str | None, response: str, metadata: dict[str, Any], bonus: float = 0.0) -> float:
    return float(response == answer) + bonus


def _raise(error: BaseException) -> None:
    raise error


def _spin() -> None:
    while True:
        pass


def _wait_for_children() -> None:
    children = [subprocess.Popen(["sleep", "3600"], start_new_session=own) for own in (False, True)]
    Path(os.environ["CHILD_PIDS"]).write_text(" ".join(str(child.pid) for child in children))
    time.sleep(3600)


def _square(number: int) -> int:
    return number * number


def _in_a_pool() -> int:
    with ProcessPoolExecutor(1) as pool:
        return pool.submit(_square, 6).result()


def _terminated() -> int | None:
    """The exit code of a process that does not end by itself."""
    process = multiprocessing.Process(target=_spin)
    process.start()
    process.terminate()
    process.join()
    return process.exitcode


def _forked() -> int:
    """The exit code of a fork that ends as a program does."""
    fork = os.fork()
    if fork == 0:
        sys.exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])


BEHAVIOURS: dict[str, Callable[[], Any]] = {
    "raise": lambda: _raise(RuntimeError("no such luck")),
    "interrupt": lambda: _raise(KeyboardInterrupt()),
    "exit": lambda: sys.exit(3),
    "hang": lambda: time.sleep(3600),
    "spin": _spin,
    "children": _wait_for_children,
    "pool": _in_a_pool,
    "terminate": _terminated,
    "fork": _forked,
    "die": lambda: os.kill(os.getpid(), 9),
    "quit": lambda: os._exit(7),
    "crash": lambda: ctypes.string_at(0),
    "pid": os.getpid,
    "tasks": lambda: len(os.listdir("/proc/self/task")),
    "session": lambda: subprocess.Popen(["sleep", "300"], start_new_session=True).pid,
    "launcher": lambda: sum(name.startswith(("PMI_", "SLURM_", "OMPI_")) for name in os.environ),
    "torch": lambda: float("torch" in sys.modules or "mpi4py" in sys.modules),
    "nan": lambda: float("nan"),
    "none": lambda: None,
}


def act(prompt: str, answer: str | None, response: str, metadata: dict[str, Any]) -> Any:
    """Behaves as the response names it."""
    return BEHAVIOURS.get(response, lambda: float(response))()


def hungry(prompt: str, answer: str | None, response: str, metadata: dict[str, Any]) -> float:
    """Allocates as many GiB as the response, none of them written; returns this process's oom_score_adj."""
    assert len(bytes(int(response) << 30)) == int(response) << 30
    with open("/proc/self/oom_score_adj") as file:
        return float(file.read())


_KEPT: list[bytes] = []


def keeps(prompt: str, answer: str | None, response: str, metadata: dict[str, Any]) -> float:
    """Keeps as many MiB as the response says for good; "all": as many as there are."""
    while True:
        _KEPT.append(bytes(int(response.replace("all", "100")) << 20))
        if response != "all":
            break
    return float(len(_KEPT))


def too_few(prompt: str) -> float:
    return 0.0
