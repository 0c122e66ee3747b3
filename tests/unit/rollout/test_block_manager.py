"""The block pool against a naive model."""

from __future__ import annotations

import random
from collections import Counter

from megatron_tlt.rollout.block_manager import BlockManager


def test_random_operations_match_a_naive_model():
    rng = random.Random(3)
    pool = BlockManager(40, 16)
    holders: list[list[int]] = []
    for _ in range(3000):
        held = Counter(block for holder in holders for block in holder)
        counts = [held[b] for b in range(40)]
        assert pool._references == counts
        assert pool.num_free == counts.count(0)
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
