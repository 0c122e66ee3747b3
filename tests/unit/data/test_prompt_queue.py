"""Queues of several replicas in one process: each prompt goes to one of them, whichever fetches when."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace

import pytest

from megatron_tlt.data.prompt_queue import PromptQueue, PromptQueues
from megatron_tlt.types import Prompt

PROMPTS = [Prompt(i, f"q{i}", (1, 2), "?") for i in range(11)]


def open_queues(
    ranks: int, max_running: int | None, num_samples: int = 2, tp: int = 1, prompts: list[Prompt] = PROMPTS
) -> tuple[list[PromptQueue], list[int]]:
    """Those of all ranks, and how much each call added to their counter."""
    added: list[int] = []
    agreed: dict[int, list[int]] = {}

    def count(more: int) -> int:
        added.append(more)
        return sum(added)

    def agree(rank: int, value: int) -> int:
        """The first rank of an engine fetches first; the others get its values in order."""
        tickets = agreed.setdefault(rank // tp, [])
        if value >= 0:
            tickets.extend([value] * (tp - 1))
            return value
        return tickets.pop(0)

    worlds = [SimpleNamespace(rank=rank, size=ranks, new_counter=lambda: count) for rank in range(ranks)]
    return [
        PromptQueues(world, tp, partial(agree, world.rank), max_running).open(prompts, num_samples)  # type: ignore[arg-type]
        for world in worlds
    ], added


def test_the_next_prompts_are_shared_from_the_first_one_on() -> None:
    counts: list[int] = []

    def count(more: int) -> int:
        counts.append(more)
        return len(counts)

    worlds = [SimpleNamespace(rank=rank, size=2, new_counter=lambda: count) for rank in range(2)]
    one, two = (PromptQueues(world, 1, int, 64).open_shared() for world in worlds)  # type: ignore[arg-type]
    first, second = one(PROMPTS), two(PROMPTS)
    assert [next(first).prompt_id, next(first).prompt_id, next(second).prompt_id, next(first).prompt_id] == [0, 1, 2, 3]
    assert ids(first) == [0, 1, 3] and len(list(second)) == 7 and not list(first)


def ids(queue: PromptQueue) -> list[int]:
    return [prompt.prompt_id for prompt in queue.fetched]


@pytest.mark.parametrize(
    ("ranks", "max_running", "own"),
    [
        (1, 4, [[*range(11)]]),
        (2, None, [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9]]),  # static
        (2, 4, [[0, 2], [1, 3]]),
        (2, 3, [[0, 2], [1, 3]]),  # the last group fills the engine more than enough
        (2, 64, [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]),  # all fit but one
        (4, 1, [[0], [1], [2], [3]]),
        (16, 4, [[]] * 16),
    ],
)
def test_a_replica_begins_with_what_fills_its_engine(ranks: int, max_running: int | None, own: list[list[int]]):
    queues, added = open_queues(ranks, max_running)
    for queue, expected in zip(queues, own, strict=True):
        for _ in expected:
            next(queue)
        assert ids(queue) == expected
    assert added == [], "no replica has asked for more"


@pytest.mark.parametrize("seed", range(8))
def test_every_prompt_is_fetched_once_and_an_empty_queue_asks_once(seed: int):
    rng = random.Random(seed)
    ranks, max_running = rng.choice((1, 2, 3, 5)), rng.choice((1, 2, 6, 64, None))
    queues, added = open_queues(ranks, max_running)
    live = list(queues)
    while live:
        queue = rng.choice(live)
        if next(queue, None) is None:
            live.remove(queue)
            assert next(queue, None) is None
    assert sorted(i for queue in queues for i in ids(queue)) == [*range(11)]
    assert all(more == 1 for more in added)
    assert len(added) <= len(PROMPTS) + ranks


def test_ranks_of_one_engine_fetch_the_same_prompts():
    queues, added = open_queues(4, 2, tp=2)
    for first in (0, 2):
        for _ in range(3):
            for queue in queues[first : first + 2]:
                next(queue)
    assert [ids(queue) for queue in queues] == [[0, 2, 3], [0, 2, 3], [1, 4, 5], [1, 4, 5]]
    assert len(added) == 4
