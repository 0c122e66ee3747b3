"""Coupled verification of chains against a loop."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_tlt.backends.vllm.plugin.keyed import follow


def by_hand(tokens: list[int], drafts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """What each request emits, and how many of its drafted tokens that accepts."""
    emitted, accepted, at = [], [], 0
    for draft in drafts:
        n = 0
        while n < len(draft) and draft[n] == tokens[at + n]:
            n += 1
        emitted.append(tokens[at : at + n + 1])
        accepted.append(n)
        at += len(draft) + 1
    return emitted, accepted


@pytest.mark.parametrize("seed", range(20))
def test_a_chain_is_followed_as_far_as_it_agrees(seed: int) -> None:
    random = np.random.default_rng(seed)
    counts = random.integers(0, 5, size=random.integers(1, 9))
    drafts = [random.integers(0, 3, n).tolist() for n in counts]
    tokens = random.integers(0, 3, int((counts + 1).sum()))
    flat = np.array([t for draft in drafts for t in draft], np.int64)
    out, accepted = follow(tokens, counts, flat)
    emitted, expected = by_hand(tokens.tolist(), drafts)
    assert out.dtype == np.int32
    assert out.shape == (len(counts), counts.max() + 1)
    assert [row[row >= 0].tolist() for row in out] == emitted
    assert accepted.tolist() == expected
