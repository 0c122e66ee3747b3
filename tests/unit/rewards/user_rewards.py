"""Functions a user might write, good and bad. The response names the behaviour."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from typing import Any

NOT_A_FUNCTION = 3


def good(
    prompt: str, answer: str | None, response: str, metadata: dict[str, Any], bonus: float = 0.0
) -> float:
    return float(response == answer) + bonus


def act(prompt: str, answer: str | None, response: str, metadata: dict[str, Any]) -> Any:
    """Behaves as the response names it."""
    if response == "raise":
        raise RuntimeError("no such luck")
    if response == "exit":
        sys.exit(3)
    if response == "hang":
        time.sleep(3600)
    if response == "spin":
        while True:
            pass
    if response == "die":
        os.kill(os.getpid(), 9)
    if response == "quit":
        os._exit(7)
    if response == "crash":
        ctypes.string_at(0)
    if response == "pid":
        return os.getpid()
    if response == "launcher":
        return sum(name.startswith(("PMI_", "SLURM_", "OMPI_")) for name in os.environ)
    if response == "torch":
        return float("torch" in sys.modules or "mpi4py" in sys.modules)
    special = {
        "nan": float("nan"),
        "inf": float("inf"),
        "none": None,
        "str": "1.0",
        "list": [1],
        "bool": True,
    }
    return special[response] if response in special else float(response)


def hungry(prompt: str, answer: str | None, response: str, metadata: dict[str, Any]) -> float:
    """Allocates as many GiB as the response; returns this process's oom_score_adj."""
    assert len(bytearray(int(response) << 30)) == int(response) << 30
    with open("/proc/self/oom_score_adj") as file:
        return float(file.read())


def too_few(prompt: str) -> float:
    return 0.0
