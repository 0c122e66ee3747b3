"""The rollout of one rank: responses to its own prompts, then to requests stolen from busy replicas.

    replica 0   generate ==============================================| idle window
    replica 1   generate ===========| steal | generate stolen ==| steal | idle window
                                    ^ no request left          ^ no replica has a queue

A replica that steals waits for its victim's next engine step; the victim does not wait. Between two
engine steps every rank reports its progress (`idle.coordinator`) and looks for a signal (`resilience.shutdown`), which
may cut the rollout short.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from megatron_tlt.config.dims import rollout_replica
from megatron_tlt.idle.policy import tokens_left

if TYPE_CHECKING:
    from megatron_tlt.distributed.world import World
    from megatron_tlt.drafter.controller import OnlineDrafterController
    from megatron_tlt.idle.window import IdleWindow
    from megatron_tlt.interfaces import ProgressCallback, RolloutBackend
    from megatron_tlt.resilience.rollout_cache import RolloutCache
    from megatron_tlt.resilience.shutdown import GracefulShutdown
    from megatron_tlt.trainer.stolen_requests import StolenRequests
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
        idle_window: IdleWindow,
        shutdown: GracefulShutdown,
        on_progress: ProgressCallback,
        rollout_tp: int = 1,
        stolen: StolenRequests | None = None,
    ):
        """`rollout_tp`: ranks of one engine. `stolen`: None without work stealing."""
        self._world, self._backend, self._cache, self._drafter = world, backend, rollout_cache, drafter
        self._window, self._shutdown, self._stolen = idle_window, shutdown, stolen
        self._on_progress = on_progress
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
        """Samples of this replica's share of `prompts` (all replicas'), and of requests that it stole.

        Opens the idle window. Returns when this replica has no request left and there is none to steal.
        """
        self._window.begin()
        with nullcontext() if self._stolen is None else self._stolen.holding():
            samples = self._run(partial(self._cache.generate, self.own(prompts)))
            if self._stolen is not None:
                samples += self._steal_and_generate(self._stolen, prompts)
        if samples:
            self._lengths = np.sort(np.array([len(s.token_ids) for s in samples], np.float64))
        return samples

    def return_stolen(self, samples: list[Sample], prompts: Sequence[Prompt]) -> list[Sample]:
        """The samples of this replica's share of `prompts`, whichever rank generated them. Collective."""
        if self._stolen is None:
            return samples
        home = {prompt.prompt_id: i % self._num_replicas for i, prompt in enumerate(prompts)}
        return self._stolen.return_home(samples, home)

    def take_metrics(self) -> dict[str, float]:
        """This rank's metrics since the last call; see `RunMetrics.log`."""
        return {} if self._stolen is None else {"idle/stolen_requests": self._stolen.take_count()}

    def _steal_and_generate(self, stolen: StolenRequests, prompts: Sequence[Prompt]) -> list[Sample]:
        """Samples of stolen requests, until no replica has a queue or a signal cuts the rollout short."""
        by_id = {prompt.prompt_id: prompt for prompt in prompts}
        samples: list[Sample] = []
        while not self.is_cut_short and (requests := self._window.steal_work()):
            theirs = [by_id[prompt_id] for prompt_id in {prompt_id for prompt_id, _ in requests}]
            keep = self._cache.writer_for(theirs)
            samples += self._run(partial(stolen.generate, by_id, requests, keep))
        return samples

    def _run(self, generate: Callable[[ProgressCallback], list[Sample]]) -> list[Sample]:
        """One `generate` of the engine; collects hidden states. Mutates `is_cut_short`."""
        with self._drafter.collecting():
            samples, self.is_cut_short = self._shutdown.interruptible(generate, self._progress_callback())
        return samples

    def _progress_callback(self) -> ProgressCallback:
        """Reports the replica's progress to the watchdog, the idle coordinator and the display."""

        def report(running: int, waiting: int, generated_tokens: int) -> None:
            lengths = self._backend.running_lengths()
            left = tokens_left(lengths, waiting, self._lengths)
            longest = int(lengths.max(initial=0))
            self._world.heartbeat(state="BUSY", running=running, queued=waiting, longest=longest, left=left)
            self._window.coordinator.progress()
            self._on_progress(running, waiting, generated_tokens)

        return report
