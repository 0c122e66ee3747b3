"""`accept_matches` against its definition, and its small cases. Exactness: tests/numerics/test_verifiers.py.

Legend: B rows, N nodes, T = B + N.
"""

from __future__ import annotations

import numpy as np
import pytest

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
