"""The block pool against a naive model."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from megatron_tlt.rollout.block_manager import BlockManager


def test_random_operations_match_a_naive_model():
    rng = random.Random(3)
    pool = BlockManager(40, 16)
    holders: list[list[int]] = []
    for _ in range(3000):
        held = Counter(block for holder in holders for block in holder)
        counts = [held[b] for b in range(40)]
        assert [pool.references(b) for b in range(40)] == counts
        assert pool.num_free == counts.count(0) == 40 - pool.num_used
        action = rng.random()
        if action < 0.4 and pool.num_free:
            wanted = rng.randint(0, min(6, pool.num_free))
            taken = pool.allocate(wanted)
            assert len(set(taken)) == wanted
            assert all(counts[b] == 0 for b in taken)
            holders.append(taken)
        elif action < 0.6 and 0 < len(holders) < 30:
            fork = list(rng.choice(holders))
            pool.share(fork)
            holders.append(fork)
        elif holders:
            pool.free(holders.pop(rng.randrange(len(holders))))
    for holder in holders:
        pool.free(holder)
    assert pool.num_free == 40


def test_freeing_twice_is_an_assertion():
    pool = BlockManager(4, 16)
    blocks = pool.allocate(2)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


def test_a_free_block_cannot_be_shared():
    with pytest.raises(AssertionError, match="cannot be shared"):
        BlockManager(4, 16).share([1])


def test_taking_more_than_is_free_is_an_assertion():
    with pytest.raises(AssertionError, match="5 blocks requested, 4 free"):
        BlockManager(4, 16).allocate(5)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_blocks_for(tokens: int, blocks: int):
    assert BlockManager(4, 16).blocks_for(tokens) == blocks
