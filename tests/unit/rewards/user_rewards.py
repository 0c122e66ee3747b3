"""Functions a user might write, good and bad. The response names the behaviour."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NOT_A_FUNCTION = 3


def good(
    prompt: str, answer: str | None, response: str, metadata: dict[str, Any], bonus: float = 0.0
) -> float:
    return float(response == answer) + bonus


def _raise(error: BaseException) -> None:
    raise error


def _spin() -> None:
    while True:
        pass


def _start_child() -> None:
    with subprocess.Popen(["sleep", "3600"]) as child:
        Path(os.environ["CHILD_PID"]).write_text(str(child.pid))


BEHAVIOURS: dict[str, Callable[[], Any]] = {
    "raise": lambda: _raise(RuntimeError("no such luck")),
    "interrupt": lambda: _raise(KeyboardInterrupt()),
    "exit": lambda: sys.exit(3),
    "hang": lambda: time.sleep(3600),
    "spin": _spin,
    "child": _start_child,
    "die": lambda: os.kill(os.getpid(), 9),
    "quit": lambda: os._exit(7),
    "crash": lambda: ctypes.string_at(0),
    "pid": os.getpid,
    "tasks": lambda: len(os.listdir("/proc/self/task")),
    "launcher": lambda: sum(name.startswith(("PMI_", "SLURM_", "OMPI_")) for name in os.environ),
    "torch": lambda: float("torch" in sys.modules or "mpi4py" in sys.modules),
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "none": lambda: None,
    "str": lambda: "1.0",
    "list": lambda: [1],
    "bool": lambda: True,
}


def act(prompt: str, answer: str | None, response: str, metadata: dict[str, Any]) -> Any:
    """Behaves as the response names it."""
    return BEHAVIOURS.get(response, lambda: float(response))()


def hungry(prompt: str, answer: str | None, response: str, metadata: dict[str, Any]) -> float:
    """Allocates as many GiB as the response, none of them written; returns this process's oom_score_adj."""
    assert len(bytes(int(response) << 30)) == int(response) << 30
    with open("/proc/self/oom_score_adj") as file:
        return float(file.read())


def too_few(prompt: str) -> float:
    return 0.0
