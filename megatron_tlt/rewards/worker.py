"""A reward worker: a process of the pool (`rewards.pool`) that judges one sample at a time, without MPI and torch.

This module imports no numpy: `start` does, after it has limited numpy's threads.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from multiprocessing import context
from typing import TYPE_CHECKING

from megatron_tlt.errors import TltError
from megatron_tlt.rewards.lock import FileLock
from megatron_tlt.workers.child_signals import sigterm_ends_forks
from megatron_tlt.workers.process import (
    WorkerProcess,
    end_if_full,
    forks_ended,
    limit_memory,
    note_loaded,
    set_up,
)

if TYPE_CHECKING:
    from megatron_tlt.config.data import RewardSection
    from megatron_tlt.rewards.base import NamedScorer, Scorer
    from megatron_tlt.types import Prompt, RewardResult, Sample

_section: RewardSection
_scorers: list[NamedScorer]
_problem: str | None = None


class RewardProcess(WorkerProcess):
    """A worker of a reward pool, told from other workers of the rank when the pool ends."""

    def terminate(self) -> None:
        """Ends a worker whose function is overdue, and what the function has started.

        Not by SIGTERM, which workers ignore: Slurm sends it to all processes of a step, and the rank decides when to
        stop.
        """
        self.kill_group()


class WorkerContext(context.SpawnContext):
    """How the pool starts its processes."""

    Process = RewardProcess

    def RLock(self) -> FileLock:  # type: ignore[override]  # noqa: N802
        """pebble takes two of them a pool."""
        return FileLock()


def start(section_json: str, rank: int, cpus: Collection[int] = ()) -> None:
    """Initialises a new worker process for the `RewardSection`. `rank`: process id of its parent; `cpus`: see
    `set_up`.
    """
    global _section, _scorers, _problem  # noqa: PLW0603  the pool calls plain functions
    set_up(rank, cpus)
    sigterm_ends_forks()
    from megatron_tlt.config.data import RewardSection
    from megatron_tlt.rewards.build import build_scorers

    _section = RewardSection.model_validate_json(section_json)
    limit_memory(_section.worker_memory_mib)
    try:
        _scorers = [replace(named, scorer=_guarded(named.scorer)) for named in build_scorers(_section)]
    except TltError as error:
        _problem = str(error)
    note_loaded()


def problem() -> str | None:
    """Why this process cannot load the reward functions; None: it has loaded them."""
    return _problem


def judge_sample(prompt: Prompt, sample: Sample) -> RewardResult:
    """The result of one sample; see `base.judge`. Ends this process where a function has left it without memory."""
    from megatron_tlt.rewards.base import judge

    result = judge(_scorers, _section.failure_value, prompt, sample)
    end_if_full(result.failure or "")
    return result


def _guarded(scorer: Scorer) -> Scorer:
    def score(prompt: Prompt, sample: Sample) -> object:
        with forks_ended():
            return scorer(prompt, sample)

    return score
