"""The rollout of one rank: samples of its replica's share of the prompts.

Between two engine steps every rank reports its progress (`resilience.heartbeat`) and looks for a signal
(`resilience.shutdown`), which may cut the rollout short.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from megatron_tlt.config.dims import rollout_replica
from megatron_tlt.idle.policy import tokens_left

if TYPE_CHECKING:
    from megatron_tlt.distributed.world import World
    from megatron_tlt.drafter.controller import OnlineDrafterController
    from megatron_tlt.interfaces import ProgressCallback, RolloutBackend
    from megatron_tlt.resilience.rollout_cache import RolloutCache
    from megatron_tlt.resilience.shutdown import GracefulShutdown
    from megatron_tlt.types import Prompt, Sample

_FIRST_LENGTH = 256.0  # tokens that a response is expected to have before any has ended


class RolloutPhase:
    """Generates this rank's samples; the heartbeat gets an estimate of how long that takes."""

    def __init__(
        self,
        world: World,
        backend: RolloutBackend,
        rollout_cache: RolloutCache,
        drafter: OnlineDrafterController,
        shutdown: GracefulShutdown,
        on_progress: ProgressCallback,
        rollout_tp: int = 1,
    ):
        """`rollout_tp`: ranks of one engine."""
        self._world, self._backend, self._cache, self._drafter = world, backend, rollout_cache, drafter
        self._shutdown, self._on_progress = shutdown, on_progress
        self._replica, tp_rank = rollout_replica(world.rank, rollout_tp)
        self.is_group_leader = tp_rank == 0
        self._num_replicas = world.size // rollout_tp
        self._lengths = np.array([_FIRST_LENGTH])  # tokens of the last rollout's responses, ascending
        self.is_cut_short = False
        """Whether a signal ended this rank's last rollout before its last response."""

    def own(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """This replica's share of a batch."""
        return list(prompts[self._replica :: self._num_replicas])

    def generate(self, prompts: Sequence[Prompt]) -> list[Sample]:
        """Samples of this replica's share of `prompts` (all replicas'); collects hidden states.

        Returns when this replica has no request left. Mutates `is_cut_short`.
        """
        generate = partial(self._cache.generate, self.own(prompts))
        with self._drafter.collecting():
            samples, self.is_cut_short = self._shutdown.interruptible(generate, self._report)
        if samples:
            self._lengths = np.sort(np.array([len(s.token_ids) for s in samples], np.float64))
        return samples

    def _report(self, running: int, waiting: int, generated_tokens: int) -> None:
        """The replica's progress, to watchdog and display."""
        lengths = self._backend.running_lengths()
        left = tokens_left(lengths, waiting, self._lengths)
        longest = int(lengths.max(initial=0))
        self._world.heartbeat(state="BUSY", running=running, queued=waiting, longest=longest, left=left)
        self._on_progress(running, waiting, generated_tokens)
