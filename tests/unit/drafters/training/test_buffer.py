from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_tlt.drafters.training.buffer import HiddenStateBuffer
from tests.helpers.tiny_drafters import FAMILIES, random_chunk

CONFIG = FAMILIES["llama"]
BYTES = 8 + 4 * CONFIG.hidden_size  # of a token; the last has no hidden state


def buffer(mib: float = 64, window: int = 64, max_age: int = 1, seed: int = 0) -> HiddenStateBuffer:
    return HiddenStateBuffer(int(mib * (1 << 20)), window, max_age, seed)


def fill(b: HiddenStateBuffer, lengths, version: int) -> None:
    b.begin_step(version)
    for i, length in enumerate(lengths):
        b.add(random_chunk(CONFIG, length, i, version))


def held(b: HiddenStateBuffer) -> list[tuple[int, int]]:
    """(version, length), sorted."""
    return sorted((key[0], e.sequence.length) for key, e in b._entries.items())


def test_every_base_comes_once_in_an_epoch_and_windows_fit() -> None:
    lengths = [5, 9, 13, 20, 33, 64, 65, 200, 31, 7]
    b = buffer()
    fill(b, lengths, 4)
    bases, wanted = [], sum(n - 3 for n in lengths)
    while sum(map(len, bases)) < wanted:
        group = b.sample(100)
        assert len(group) * max(s.length for s in group) <= 100 and max(s.length for s in group) <= 64
        for s in group:
            assert len(s.hidden) >= s.length - 1
            first = s.offset + s.first_base
            bases.append([(s.hidden.untyped_storage().data_ptr(), first + i) for i in range(s.num_bases)])
    flat = [x for part in bases for x in part]
    assert len(flat) == wanted == len(set(flat))


def test_draws_are_a_function_of_seed_and_steps_not_of_the_order_of_arrival() -> None:
    def draws(seed: int, reverse: bool) -> list[list[int]]:
        b = buffer(0.02, seed=seed)  # 80 tokens' worth: some go by lot
        b.begin_step(0)
        chunks = [random_chunk(CONFIG, n, i) for i, n in enumerate([10, 12, 15, 20, 22, 9, 31])]
        for chunk in chunks[::-1] if reverse else chunks:
            b.add(chunk)
        return [[s.length for s in b.sample(40)] for _ in range(9)]

    assert draws(0, False) == draws(0, True)
    assert draws(0, False) != draws(5, False)


def test_offered_responses_whose_states_come_later_are_kept_as_if_they_had_come_at_once() -> None:
    """Those that are not kept are not read; of some that others drop the states come in vain."""
    lengths, at_once, later = [10, 12, 15, 20, 22, 9, 31, 3000], buffer(0.02), buffer(0.02)
    refused = 0
    for version in range(3):
        at_once.begin_step(version)
        later.begin_step(version)
        chunks = [random_chunk(CONFIG, n, i, version) for i, n in enumerate(lengths)]
        come = [c for c in chunks if later.offer(replace(c, hidden=c.hidden.to("meta")))]
        refused += len(chunks) - len(come)
        for chunk in chunks:
            at_once.add(chunk)
        for chunk in come:
            later.add(chunk)
        assert later.metrics() == at_once.metrics() and held(later) == held(at_once)
        states = zip(later.sample(40), at_once.sample(40), strict=True)
        assert all(torch.equal(mine.hidden, right.hidden) for mine, right in states)
    assert 3 <= refused < len(lengths) * 3 - len(at_once)


def test_offered_responses_whose_states_never_come_are_forgotten() -> None:
    b = buffer()
    b.begin_step(0)
    chunk = random_chunk(CONFIG, 10, 0)
    assert b.offer(replace(chunk, hidden=chunk.hidden.to("meta")))
    b.drop_offered()
    assert b.sample(40) is None and not b.metrics()["bytes"]


def test_responses_outlive_their_step_until_they_are_too_old() -> None:
    b = buffer(max_age=2)
    fill(b, [10, 20, 30], 1)
    for version in (2, 3):
        b.begin_step(version)
        assert held(b) == [(1, 10), (1, 20), (1, 30)]
    b.begin_step(4)
    assert held(b) == [] and b.counters["dropped_by_age"] == 3 and b.metrics()["bytes"] == 0


def test_what_is_held_is_drawn_alike_and_anew_with_what_is_added() -> None:
    def drawn(count: int) -> list[int]:
        lengths: list[int] = []
        while len(lengths) < count:
            lengths += [s.length for s in b.sample(64)]
        return sorted(lengths)

    b = buffer(max_age=3)
    for version in range(2):
        fill(b, range(20, 60), version)
    held = [*range(20, 60)] * 2  # of both steps
    assert drawn(80) == sorted(held)
    b.sample(64)
    b.add(random_chunk(CONFIG, 19, 99, 1))
    assert drawn(81) == sorted([19, *held])


def test_the_budget_holds_oldest_then_shortest_first() -> None:
    b = buffer((100 * BYTES) / (1 << 20), max_age=9)
    fill(b, [5, 30], 0)
    fill(b, [20, 25], 1)
    b.begin_step(2)
    assert held(b) == [(0, 5), (0, 30), (1, 20), (1, 25)]
    b.add(random_chunk(CONFIG, 40, 0, 2))
    assert held(b) == [(1, 20), (1, 25), (2, 40)]
    b.add(random_chunk(CONFIG, 30, 1, 2))
    assert held(b) == [(1, 25), (2, 30), (2, 40)]
    assert b.counters["dropped_by_budget"] == 3
    assert b.metrics()["bytes"] == sum(
        s.nbytes for e in b._entries.values() for s in (e.sequence.hidden, e.sequence.token_ids)
    )


def test_what_stays_of_a_step_too_large_is_a_fair_sample() -> None:
    """By lot: neither the first nor the short responses have an advantage."""
    counts = np.zeros(40)
    for seed in range(60):
        b = buffer((200 * BYTES) / (1 << 20), seed=seed)
        fill(b, [20] * 40, 0)
        for key in b._entries:
            counts[key[1]] += 1
        assert b.metrics()["bytes"] <= 200 * BYTES
    assert counts.sum() == 60 * 10
    assert counts[:20].sum() == pytest.approx(300, abs=60) and counts.max() < 32


def test_memory_is_bounded_and_nothing_larger_is_kept_alive() -> None:
    b = buffer((50 * BYTES) / (1 << 20), window=16)
    b.begin_step(0)
    storage = torch.randn(10_000, CONFIG.hidden_size)
    b.add(replace(random_chunk(CONFIG, 21), hidden=storage[100:120]))
    (entry,) = b._entries.values()
    assert entry.sequence.hidden.untyped_storage().nbytes() == 20 * 4 * CONFIG.hidden_size
    b.add(random_chunk(CONFIG, 80, 1))  # larger than everything
    assert len(b) == 1 and b.counters["dropped_by_budget"] == 1
