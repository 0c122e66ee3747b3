"""A reward worker: a process of the pool (`rewards.pool`) that judges one sample at a time, without MPI and torch.

This module imports no numpy: `start` does, after it has limited numpy's threads.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from multiprocessing import context
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING

from megatron_tlt.distributed.child_signals import signals_blocked, unblock_signals
from megatron_tlt.errors import TltError

if TYPE_CHECKING:
    from megatron_tlt.config.data import RewardSection
    from megatron_tlt.rewards.base import NamedScorer
    from megatron_tlt.types import Prompt, RewardResult, Sample

# Variables by which MPI finds its ranks: removed, so that a user's function may import mpi4py.
_LAUNCHER = ("PMI_", "PMIX_", "PMI2_", "MPI_", "MPIR_", "MPICH_", "OMPI_", "HYDRA_", "HYDI_", "SLURM_")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_PR_SET_PDEATHSIG = 1
_NEARLY = 0.9  # of the timeout: the worker's clock starts after the pool's

_section: RewardSection
_scorers: list[NamedScorer]
_problem: str | None = None
_overdue_at = math.inf


class WorkerProcess(context.SpawnProcess):
    """A fresh interpreter without the rank's main module, which multiprocessing would import and which starts MPI."""

    def start(self) -> None:
        """Starts the process; signals to the rank are blocked until `start` handles them."""
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            with signals_blocked():
                super().start()
        finally:
            sys.modules["__main__"] = main


class WorkerContext(context.SpawnContext):
    """How the pool starts its processes."""

    Process = WorkerProcess


def start(section_json: str, rank: int) -> None:
    """Initialises a new worker process for the `RewardSection`. `rank`: process id of its parent."""
    global _section, _scorers, _problem  # noqa: PLW0603  the pool calls plain functions
    _die_with(rank)
    os.setsid()  # a process group of its own, see `_on_terminate`
    os.dup2(2, 1)  # prints of a user's function must not mix with the rank's own output
    for name in [name for name in os.environ if name.startswith(_LAUNCHER)]:
        del os.environ[name]
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    unblock_signals()
    signal.signal(signal.SIGTERM, _on_terminate)
    from megatron_tlt.config.data import RewardSection
    from megatron_tlt.rewards.build import build_scorers

    _section = RewardSection.model_validate_json(section_json)
    _limit_memory(_section.worker_memory_mib)
    try:
        _scorers = build_scorers(_section)
    except TltError as error:
        _problem = str(error)


def problem() -> str | None:
    """Why this process cannot load the reward functions; None: it has loaded them."""
    return _problem


def judge_sample(prompt: Prompt, sample: Sample) -> RewardResult:
    """The result of one sample; see `base.judge`."""
    global _overdue_at  # noqa: PLW0603
    from megatron_tlt.rewards.base import judge

    _overdue_at = time.monotonic() + _NEARLY * _section.timeout_s
    try:
        return judge(_scorers, _section.failure_value, prompt, sample)
    finally:
        _overdue_at = math.inf


def _on_terminate(number: int, frame: FrameType | None) -> None:
    """Ends this process and those that a reward function has started, if the function is overdue.

    Otherwise the signal is Slurm's, sent to all processes of the rank's step: the rank decides when to stop.
    """
    if time.monotonic() >= _overdue_at:
        os.killpg(0, signal.SIGKILL)


def _limit_memory(mib: int) -> None:
    """Limits the process: more raises MemoryError in the user's function, before the machine is out of memory.

    If the machine runs out of memory all the same, Linux kills this process and not a rank.
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
