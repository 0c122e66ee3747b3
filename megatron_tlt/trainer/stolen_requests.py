"""Work stealing, bound to engine and exchange: which requests leave the queue, who responses them, where responses go.

    replica 0   generate ============================== | .. | its groups, complete again: score ...
    replica 1   generate ======= | replica 0's requests | .. | returns the responses
                                 ^ protocol: `idle.work_stealing`

A response does not depend on the replica that generates it (keyed sampling, docs/numerics.md), and it is returned to
its prompt's replica before scoring: rewards, gradients and weights are the same as without work stealing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from megatron_tlt.distributed.exchange import redistribute
from megatron_tlt.idle.policy import share_of_queue

if TYPE_CHECKING:
    from megatron_tlt.backends.embedded import EmbeddedBackend
    from megatron_tlt.backends.vllm.backend import VllmBackend
    from megatron_tlt.distributed.world import World
    from megatron_tlt.interfaces import ProgressCallback
    from megatron_tlt.types import Prompt, Sample, SamplingParams


class StolenRequests:
    """One rank's queue as victim (`idle.work_stealing.RequestQueue`), and its rollouts as thief."""

    def __init__(
        self, engine: EmbeddedBackend | VllmBackend, params: SamplingParams, num_samples: int, world: World
    ):
        self._engine, self._params, self._num_samples, self._world = engine, params, num_samples, world
        self._count = 0

    def holding(self) -> AbstractContextManager[None]:
        """Around the rollouts of one step: the engine keeps its KV cache between them."""
        return self._engine.holding()

    def num_queued(self) -> int:
        """Requests that could be stolen; -1 where the next step may still change that: no request runs yet, or prompts
        are being prefilled.
        """
        count = self._engine.num_unstarted
        is_known = self._engine.num_running > 0 if count else not self._engine.is_prefilling
        return count if is_known else -1

    def withdraw_share(self) -> list[tuple[int, int]]:
        """Removes a share of the queue from its end and returns it: (prompt id, sample index)."""
        count = share_of_queue(max(0, self.num_queued()), self._engine.num_running)
        return self._engine.withdraw(count)

    def generate(
        self,
        prompts: Mapping[int, Prompt],
        requests: Sequence[tuple[int, int]],
        on_response: Callable[[Sample], None] | None,
        on_progress: ProgressCallback,
    ) -> list[Sample]:
        """Samples of stolen `requests` (prompt id, sample index); `prompts`, by id, are those of all replicas."""
        stolen: dict[int, set[int]] = defaultdict(set)
        for prompt_id, index in sorted(requests):
            stolen[prompt_id].add(index)
        num_samples = self._num_samples
        have = [(at, i) for at, samples in stolen.items() for i in range(num_samples) if i not in samples]
        theirs = [prompts[prompt_id] for prompt_id in stolen]
        return self._engine.generate(
            theirs, self._params, num_samples, on_progress, have, on_response, goes_on=True
        )

    def return_home(self, samples: Sequence[Sample], home: Mapping[int, int]) -> list[Sample]:
        """All samples of this rank's prompts, whichever rank generated them, sorted by (prompt_id, sample_index).

        Collective. `samples` are those that this rank generated; `home` is the rank of each prompt id.
        """
        rank = self._world.rank
        own = [sample for sample in samples if home[sample.prompt_id] == rank]
        others = [(s, [home[s.prompt_id]]) for s in samples if home[s.prompt_id] != rank]
        self._count += len(others)
        own += redistribute(self._world, others)
        return sorted(own, key=lambda sample: (sample.prompt_id, sample.sample_index))

    def take_count(self) -> float:
        """Responses to stolen requests that this rank has generated since the last call."""
        count, self._count = self._count, 0
        return float(count)
