"""The suffix drafter against a reference in plain Python."""

from __future__ import annotations

import random

import numpy as np
import pytest

from megatron_tlt.types import DraftStrategy
from tests.helpers.naive_suffix import NaiveCounts
from tests.helpers.suffix_tables import Pool, Table, V, check_against_naive, make_request, repetitive


@pytest.mark.parametrize("seed", range(6))
def test_counts_equal_a_naive_reference(seed: int) -> None:
    rng = random.Random(seed)
    depth = rng.randint(1, 7)
    pool, naive = Pool(depth), NaiveCounts(depth)
    prompt = repetitive(rng, rng.randint(1, 30))
    base = pool.sequence()
    pool.append(base, prompt)
    naive.add([], prompt)
    texts = []
    for _ in range(5):
        weight = rng.randint(1, 3)
        texts.append((pool.sequence(base, weight), weight, list(prompt)))
        run = repetitive(rng, 1)
        pool.append(texts[-1][0], run)
        naive.add(prompt, run, weight)
        texts[-1][2].extend(run)
    source = repetitive(rng, 400)
    for _ in range(60):
        sequence, weight, text = rng.choice(texts)
        at = rng.randrange(390)
        run = source[at : at + rng.randint(1, 8)]
        pool.append(sequence, run)
        naive.add(text, run, weight)
        text.extend(run)
    for context, after in naive.follow.items():
        for token in range(V):
            assert pool.count([*context, token]) == after.get(token, 0)
    for _ in range(300):
        string = [rng.randrange(V) for _ in range(rng.randint(1, depth + 1))]
        assert pool.count(string) == naive.count(string)


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_drafts_equal_a_naive_reference_with_keyed_noise(seed: int, topk: int) -> None:
    rng = random.Random(seed)
    table = Table(depth=rng.randint(1, 6))
    strategy = DraftStrategy("suffix", 5, topk)
    prompts = {name: repetitive(rng, rng.randint(1, 25)) for name in "ab"}
    source = {name: repetitive(rng, 300) for name in "ab"}
    for order in range(6):
        name = "ab"[order % 2]
        table.admit(make_request(order, prompts[name], repetitive(rng, 1), rng.choice([0.0, 0.7, 1.0]), name))
    compared = 0
    for _ in range(25):
        compared += check_against_naive(table, table.propose(strategy), strategy)
        runs = []
        for request in table.rows.requests:
            at = rng.randrange(290)
            runs.append(source[request.dataset_id][at : at + rng.randint(1, 5)])
        table.extend(runs)
    assert compared > 500


def test_the_shape_of_a_tree_and_its_limits() -> None:
    table, rng = Table(), random.Random(2)
    for order in range(4):
        table.admit(make_request(order, [1, 2], [0]))
    table.extend([repetitive(rng, 200) for _ in range(4)])
    lengths = [0, 3, 6, 1]
    full = table.propose(DraftStrategy("suffix", 6, 3), lengths)
    assert full.counts[0] == 0
    assert full.counts[3] > 1
    for strategy in (DraftStrategy("suffix", 6, 3, 6), DraftStrategy("suffix", 6, 3, 0, 0.2)):
        draft = table.propose(strategy, lengths)
        assert draft.num_nodes < full.num_nodes
        at = 0
        for row, count in enumerate(draft.counts.tolist()):
            nodes = slice(at, at + count)
            depths, parents, cumulative_acceptance = (
                draft.depths[nodes],
                draft.parents[nodes],
                draft.cumulative_acceptance[nodes],
            )
            trunk = int(depths.max(initial=0))
            assert trunk <= lengths[row]
            assert depths[:trunk].tolist() == list(range(1, trunk + 1))
            assert parents[:trunk].tolist() == list(range(-1, trunk - 1))
            for i in range(count):
                assert parents[i] < i
                assert depths[i] == (depths[parents[i]] + 1 if parents[i] >= 0 else 1)
                assert parents[i] < 0 or cumulative_acceptance[i] <= cumulative_acceptance[parents[i]]
            if strategy.num_verify_tokens:
                assert count <= 5
            assert (cumulative_acceptance >= strategy.min_cumulative_acceptance).all()
            at += count
    # What a smaller budget leaves are the nodes most likely to be emitted.
    best = np.sort(full.cumulative_acceptance[: full.counts[1]])[::-1][:3]
    small = table.propose(DraftStrategy("suffix", 6, 3, 4), lengths)
    assert np.sort(small.cumulative_acceptance[: small.counts[1]])[::-1] == pytest.approx(best)
