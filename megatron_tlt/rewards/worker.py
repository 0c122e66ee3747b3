"""A reward worker: a process of the pool (`rewards.pool`) that judges one sample at a time, without MPI and torch.

This module imports no numpy: `start` does, after it has limited numpy's threads.
"""

from __future__ import annotations

import math
import os
import signal
import time
from multiprocessing import context
from types import FrameType
from typing import TYPE_CHECKING

from megatron_tlt.errors import TltError
from megatron_tlt.rewards.lock import FileLock
from megatron_tlt.workers.process import WorkerProcess, limit_memory, set_up

if TYPE_CHECKING:
    from megatron_tlt.config.data import RewardSection
    from megatron_tlt.rewards.base import NamedScorer
    from megatron_tlt.types import Prompt, RewardResult, Sample

_NEARLY = 0.9  # of the timeout: the worker's clock starts after the pool's

_section: RewardSection
_scorers: list[NamedScorer]
_problem: str | None = None
_overdue_at = math.inf


class RewardProcess(WorkerProcess):
    """A worker of a reward pool, told from other workers of the rank when the pool ends."""


class WorkerContext(context.SpawnContext):
    """How the pool starts its processes."""

    Process = RewardProcess

    def RLock(self) -> FileLock:  # type: ignore[override]  # noqa: N802
        """pebble takes two of them a pool."""
        return FileLock()


def start(section_json: str, rank: int) -> None:
    """Initialises a new worker process for the `RewardSection`. `rank`: process id of its parent."""
    global _section, _scorers, _problem  # noqa: PLW0603  the pool calls plain functions
    set_up(rank)
    signal.signal(signal.SIGTERM, _on_terminate)
    from megatron_tlt.config.data import RewardSection
    from megatron_tlt.rewards.build import build_scorers

    _section = RewardSection.model_validate_json(section_json)
    limit_memory(_section.worker_memory_mib)
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
