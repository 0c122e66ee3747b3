"""Which replica generates the responses to which prompts of a rollout: replicas fetch prompts as they have room.

    replica 0   [first prompts 0 2] ===========|fetch 5|=====|fetch 7|=======|none left
    replica 1   [first prompts 1 3] ====|fetch 4|======|fetch 6|==========|none left
                ^ as many as fill an engine             ^ one counter, shared by all replicas

A response depends on its prompt, not on its replica (keyed sampling, docs/design/numerics.md), so any replica
may fetch any prompt, with all of its samples, and nothing is ever handed back. Every replica begins with
equally many of the first prompts, every R-th one, as many as fill its engine; where all fit, nothing is left
to fetch. An engine fetches the next prompts while fewer requests than `rollout.max_running_requests` live in it
and its cache has free blocks beyond those of prompts that wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_tlt.config.dims import is_first_of_engine, rollout_replica

if TYPE_CHECKING:
    from megatron_tlt.distributed.world import World
    from megatron_tlt.types import Prompt


class PromptQueue(Iterator["Prompt"]):
    """The prompts that one replica generates responses to in one rollout, in the order in which it fetches them."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        replica: int,
        num_replicas: int,
        share: int,
        ticket: Callable[[], int],
    ):
        """`prompts`: those of all replicas, in one order on every rank.

        `share` of them, from the first prompts on, are this replica's own; `ticket()` numbers the others, 0 at first,
        for whichever replica calls it.
        """
        self.prompts = prompts
        self.fetched: list[Prompt] = []
        shared = num_replicas * share
        self._own = iter(prompts[replica:shared:num_replicas])
        self._shared, self._ticket = prompts[shared:], ticket
        self._is_empty = not self._shared

    def __next__(self) -> Prompt:
        """The next prompt; the first call beyond the last one ends the queue for good."""
        prompt = next(self._own, None)
        if prompt is None:
            prompt = self._fetch_shared()
        self.fetched.append(prompt)
        return prompt

    def _fetch_shared(self) -> Prompt:
        if not self._is_empty and (number := self._ticket()) < len(self._shared):
            return self._shared[number]
        self._is_empty = True
        raise StopIteration


def first_share(num_prompts: int, num_replicas: int, num_samples: int, max_running: int | None) -> int:
    """Prompts that each replica begins with; all of its part where `max_running` is None or there is one replica."""
    if max_running is None or num_replicas == 1:
        return -(-num_prompts // num_replicas)
    return min(-(-max_running // num_samples), num_prompts // num_replicas)


@dataclass(frozen=True)
class PromptQueues:
    """Opens the queues of one rank."""

    world: World
    tp: int
    """Ranks of one engine, which fetch the same prompts."""
    agree: Callable[[int], int]
    """The largest value of the engine's ranks: a collective among them."""
    max_running: int | None
    """Requests that an engine runs at once; None: prompts are dealt out before the rollout, every R-th one."""

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of its engine."""
        return is_first_of_engine(self.world.rank, self.tp)

    @property
    def num_replicas(self) -> int:
        """R."""
        return self.world.size // self.tp

    def open(self, prompts: Sequence[Prompt], num_samples: int) -> PromptQueue:
        """The queue of a rollout of `prompts`, those of all replicas. All ranks open their queues in the same order."""
        share = first_share(len(prompts), self.num_replicas, num_samples, self.max_running)
        replica = rollout_replica(self.world.rank, self.tp)
        return PromptQueue(prompts, replica, self.num_replicas, share, self._new_ticket())

    def open_shared(self) -> Callable[[Sequence[Prompt]], PromptQueue]:
        """As `open`, for prompts that are named later, and not on all ranks; none is a replica's own."""
        replica = rollout_replica(self.world.rank, self.tp)
        ticket = self._new_ticket()
        return lambda prompts: PromptQueue(prompts, replica, self.num_replicas, 0, ticket)

    def _new_ticket(self) -> Callable[[], int]:
        is_first, count = self.is_first, self.world.new_counter()
        return lambda: self.agree(count(1) - 1 if is_first else -1)
