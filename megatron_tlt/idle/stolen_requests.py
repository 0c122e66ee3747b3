"""Requests that wait in a busy replica's engine are answered by one that has run dry (`idle.work_stealing`).

    replica 0   answering ============================== | .. | its groups, whole again: score ...
    replica 1   answering ======= | ask | replica 0's == | .. | sends them home
                                    ^ how: `idle.takeover`

Answers do not depend on who gives them (keyed sampling, docs/numerics.md), and before anything is done with them they
are where they would have been: so rewards, gradients and weights do not know of this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from megatron_tlt.distributed.exchange import redistribute
from megatron_tlt.idle.policy import share_of_queue
from megatron_tlt.idle.work_stealing import pieces_of
from megatron_tlt.interfaces import KeyedEngine

if TYPE_CHECKING:
    from megatron_tlt.distributed.world import World
    from megatron_tlt.idle.messages import RequestRange
    from megatron_tlt.interfaces import ProgressCallback
    from megatron_tlt.types import Prompt, Sample, SamplingParams


class LendingEngine(KeyedEngine, Protocol):
    """A keyed engine whose queue can be taken from while it answers."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_unstarted(self) -> int: ...
    @property
    def is_prefilling(self) -> bool: ...
    def holding(self) -> AbstractContextManager[None]: ...
    def withdraw(self, count: int) -> list[tuple[int, int]]: ...


class RequestStealing:
    """One replica's part, of one rank: as the one that gives, and as the one that takes."""

    def __init__(self, engine: LendingEngine, params: SamplingParams, num_samples: int, world: World):
        self._engine, self._params, self._num_samples, self._world = engine, params, num_samples, world
        self._moved = 0

    def holding(self) -> AbstractContextManager[None]:
        """Around the rollouts of one step: the engine keeps its cache from one to the next."""
        return self._engine.holding()

    def queued(self) -> int:
        """Requests that it could give away; -1 where the next step may still change that: nothing runs yet, or prompts
        are on their way into the cache.
        """
        engine = self._engine
        count = engine.num_unstarted
        is_known = engine.num_running > 0 if count else not engine.is_prefilling
        return count if is_known else -1

    def give(self) -> tuple[list[RequestRange], int]:
        """A share of the queue, from its end, and how many are left. Mutates the queue."""
        engine = self._engine
        count = share_of_queue(max(0, self.queued()), engine.num_running)
        return pieces_of(engine.withdraw(count)), self.queued()

    def answer(
        self,
        prompts: Mapping[int, Prompt],
        pieces: Sequence[RequestRange],
        on_answer: Callable[[Sample], None] | None,
        on_progress: ProgressCallback,
    ) -> list[Sample]:
        """Samples of what was given to this replica; `prompts`, by id, are those of all replicas."""
        wanted: dict[int, set[int]] = defaultdict(set)
        for piece in pieces:
            wanted[piece.prompt_id].update(range(piece.first, piece.first + piece.count))
        num_samples = self._num_samples
        have = [(at, i) for at, samples in wanted.items() for i in range(num_samples) if i not in samples]
        theirs = [prompts[prompt_id] for prompt_id in wanted]
        return self._engine.generate(
            theirs, self._params, num_samples, on_progress, have, on_answer, goes_on=True
        )

    def bring_home(self, samples: Sequence[Sample], home: Mapping[int, int]) -> list[Sample]:
        """All samples of this rank's prompts, whoever made them, sorted by (prompt_id, sample_index). Collective.

        `samples` are those that this rank made; `home` names the rank of each prompt id.
        """
        rank = self._world.rank
        mine = [sample for sample in samples if home[sample.prompt_id] == rank]
        others = [(s, [home[s.prompt_id]]) for s in samples if home[s.prompt_id] != rank]
        self._moved += len(others)
        mine += redistribute(self._world, others)
        return sorted(mine, key=lambda sample: (sample.prompt_id, sample.sample_index))

    def take_count(self) -> float:
        """Answers that this rank has made for others since the last call."""
        count, self._moved = self._moved, 0
        return float(count)
