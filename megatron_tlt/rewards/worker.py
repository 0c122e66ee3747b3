"""The reward worker: a process that judges samples, one at a time.

It is started as a fresh interpreter (see `process`), without MPI and torch.
Messages:
    out  READY | ("error", text)       once, after loading the reward functions
    in   (Prompt, Sample)              a sample to judge
    out  RewardResult                  its verdict
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from megatron_tlt.config.data import RewardSection
from megatron_tlt.distributed.child_signals import unblock_signals
from megatron_tlt.errors import TltError
from megatron_tlt.rewards.base import judge
from megatron_tlt.rewards.build import build_scorers

READY = "ready"
_PR_SET_PDEATHSIG = 1


def main(fd: int, parent: int) -> None:
    """Serves one connection until its other end closes. `parent` is the process id of the rank."""
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank decides when to stop, by closing the connection
    unblock_signals()
    connection = Connection(fd)
    try:
        section: RewardSection = connection.recv()
        _limit_memory(section.worker_memory_mib)
        try:
            scorers = build_scorers(section)
        except TltError as error:
            connection.send(("error", str(error)))
            return
        connection.send(READY)
        while True:
            prompt, sample = connection.recv()
            connection.send(judge(scorers, section.failure_value, prompt, sample))
    except (EOFError, ConnectionError):
        pass  # the rank has closed the pool, or is gone


def _limit_memory(mib: int) -> None:
    """Limits the process: more raises MemoryError in the user's function, before the machine is out of memory.

    If that happens all the same, Linux kills this process and not a rank.
    """
    wanted = mib << 20
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most == resource.RLIM_INFINITY or wanted <= most:
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, wanted))
    with suppress(OSError):  # not Linux
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _die_with(parent: int) -> None:
    """Has Linux kill this process when its parent dies, so that a hung reward does not outlive a killed rank."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before prctl
        os._exit(1)
