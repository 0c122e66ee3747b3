"""The rollout of one rank: samples of the prompts that its replica fetches (`data.prompt_queue`).

Between two engine steps every rank reports its progress (`resilience.heartbeat`) and looks for a signal
(`resilience.shutdown`), which may cut the rollout short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron_tlt.idle.policy import tokens_left
from megatron_tlt.trainer.batch_assembly import group_samples
from megatron_tlt.types import GenerateCall, SampleGroup

if TYPE_CHECKING:
    from megatron_tlt.data.prompt_queue import PromptQueues
    from megatron_tlt.distributed.world import World
    from megatron_tlt.drafter.controller import OnlineDrafterController
    from megatron_tlt.interfaces import RolloutBackend
    from megatron_tlt.resilience.rollout_cache import RolloutCache
    from megatron_tlt.resilience.shutdown import GracefulShutdown
    from megatron_tlt.types import ProgressCallback, Prompt, SamplingParams

_FIRST_LENGTH = 256.0  # tokens that a response is expected to have before any has ended


class RolloutPhase:
    """Generates this rank's samples; the heartbeat gets an estimate of how long that takes."""

    def __init__(
        self,
        world: World,
        queues: PromptQueues,
        params: SamplingParams,
        num_samples: int,
        backend: RolloutBackend,
        rollout_cache: RolloutCache,
        drafter: OnlineDrafterController,
        shutdown: GracefulShutdown,
        on_progress: ProgressCallback,
    ):
        """`num_samples`: of each prompt."""
        self._world, self.queues = world, queues
        self._params, self._num_samples = params, num_samples
        self._backend, self._cache, self._drafter = backend, rollout_cache, drafter
        self._shutdown, self._on_progress = shutdown, on_progress
        self._lengths = np.array([_FIRST_LENGTH])  # tokens of the last rollout's responses, ascending
        self.is_cut_short = False
        """Whether a signal ended this rank's last rollout before its last response."""

    def generate(self, prompts: Sequence[Prompt]) -> list[SampleGroup]:
        """Groups of samples of those `prompts` that this replica fetches, without rewards; collects hidden states.

        Returns when this replica has no request left and no prompt is left to fetch. Ranks of one engine have the same
        samples: its first one returns them. Mutates `is_cut_short`.
        """
        queue = self.queues.open(self._backend.ordered(prompts), self._num_samples)
        call = GenerateCall(queue, self._params, self._num_samples, self._report)
        with self._drafter.collecting():
            samples, self.is_cut_short = self._shutdown.interruptible(self._cache.generate, call)
        if samples:
            self._lengths = np.sort(np.array([len(s.token_ids) for s in samples], np.float64))
        return group_samples(queue.fetched, samples) if self.queues.is_first else []

    def _report(self, running: int, waiting: int, generated_tokens: int) -> None:
        """The replica's progress, to watchdog and display."""
        lengths = self._backend.running_lengths()
        left = tokens_left(lengths, waiting, self._lengths)
        longest = int(lengths.max(initial=0))
        self._world.heartbeat(state="BUSY", running=running, queued=waiting, longest=longest, left=left)
        self._on_progress(running, waiting, generated_tokens)
