"""`accept_matches` against its definition, and how often a coupled draft is accepted.

Equal responses in engines, whatever is drafted: tests/numerics/test_speculation.py. Legend: B rows, N nodes, T = B + N.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_tlt.models.keyed_noise import gumbel_noise
from megatron_tlt.models.keys import request_key, row_keys
from megatron_tlt.rollout.spec.draft import Draft
from megatron_tlt.rollout.spec.verify import accept_matches


def draft_of(counts: list[int], tokens: np.ndarray, parents: np.ndarray | None = None) -> Draft:
    nodes = len(tokens)
    return Draft(
        np.array(counts, np.int32),
        np.asarray(tokens, np.int32),
        np.ones(nodes, np.float32),
        np.ones(nodes, np.int32),
        None if parents is None else np.asarray(parents, np.int32),
    )


def random_draft(rng: np.random.Generator, rows: int, tree: bool, vocab: int = 3) -> Draft:
    counts = rng.integers(0, 7, rows).tolist()
    tokens, parents = [], []
    for count in counts:
        mine: list[tuple[int, int]] = []
        while len(mine) < count:
            parent = int(rng.integers(-1, len(mine))) if tree else len(mine) - 1
            token = int(rng.integers(0, vocab))
            if (parent, token) not in mine:  # siblings are distinct
                mine.append((parent, token))
            elif sum(p == parent for p, _ in mine) == vocab:
                mine.append((len(mine) - 1, token))
        parents += [p for p, _ in mine]
        tokens += [t for _, t in mine]
    return draft_of(counts, np.array(tokens, np.int32), np.array(parents, np.int32) if tree else None)


def walk(sampled: np.ndarray, draft: Draft) -> tuple[list[int], list[int], list[bool], list[bool]]:
    """`accept_matches` as its definition reads."""
    counts, index, accepted, reached = [], [], [], []
    node = fed = 0
    for count in draft.counts.tolist():
        parents = (
            range(-1, count - 1) if draft.parents is None else draft.parents[node : node + count].tolist()
        )
        emitted = {-1: True}
        for i, parent in enumerate(parents):
            reached.append(emitted[parent])
            emitted[i] = emitted[parent] and sampled[fed + 1 + parent] == draft.tokens[node + i]
            accepted.append(emitted[i])
        path = sorted(i for i in emitted if emitted[i])
        counts.append(len(path))
        index += [fed + 1 + i for i in path]
        node, fed = node + count, fed + count + 1
    return counts, index, [bool(a) for a in accepted], [bool(r) for r in reached]


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 32])
def test_equals_its_definition(rows: int, tree: bool):
    rng = np.random.default_rng(rows)
    accepted_some = 0
    for _ in range(300):
        draft = random_draft(rng, rows, tree)
        sampled = rng.integers(0, 3, rows + draft.num_nodes).astype(np.int32)
        verdict = accept_matches(sampled, draft)
        counts, index, accepted, reached = walk(sampled, draft)
        assert verdict.counts.tolist() == counts
        assert verdict.index.tolist() == index
        assert verdict.accepted.tolist() == accepted
        assert verdict.reached.tolist() == reached
        assert verdict.counts.dtype == verdict.index.dtype == np.int32
        assert verdict.accepted.dtype == verdict.reached.dtype == bool
        accepted_some += sum(accepted)
    assert accepted_some > 50


def test_coupled_acceptance_is_as_promised():
    """P(match) = sum over x of 1 / sum over y of max(p_y / p_x, q_y / q_x) exactly, between (1-TV)/(1+TV) and 1-TV."""
    count = 400_000
    for seed in range(3):
        rng = np.random.default_rng(seed)
        p, q = rng.dirichlet(np.ones(8)), rng.dirichlet(np.ones(8) * 2)
        p = 0.7 * p + 0.3 * q
        requests = np.array([request_key(seed, prompt, 0) for prompt in range(1 << 10)], np.uint64)
        keys = row_keys(np.resize(requests, count), np.arange(count) // len(requests))
        noise = gumbel_noise(torch.from_numpy(keys.view(np.int64)), 8)
        drawn, drafted = ((torch.from_numpy(np.log(t)).float() + noise).argmax(-1).numpy() for t in (p, q))
        ones = np.ones(count, np.int32)
        sampled = np.zeros(2 * count, np.int32)
        sampled[::2] = drawn
        draft = Draft(ones, drafted.astype(np.int32), ones.astype(np.float32), ones)
        rate = float(accept_matches(sampled, draft).accepted.mean())
        tv = 0.5 * np.abs(p - q).sum()
        exact = sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(8))
        noise_of_rate = 5 * np.sqrt(exact * (1 - exact) / count)
        assert abs(rate - exact) < noise_of_rate
        assert (1 - tv) / (1 + tv) <= exact <= 1 - tv
        assert (1 - tv) / (1 + tv) - noise_of_rate < rate < 1 - tv + noise_of_rate
