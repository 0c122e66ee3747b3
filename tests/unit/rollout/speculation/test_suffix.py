"""The suffix drafter against a reference in plain Python."""

from __future__ import annotations

import random

import pytest

from megatron_tlt.types import DraftStrategy
from tests.helpers.suffix_tables import (
    NaiveCounts,
    Pool,
    Table,
    V,
    check_against_naive,
    make_request,
    repetitive,
)


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
        texts.append((pool.sequence(base), list(prompt)))
        run = repetitive(rng, 1)
        pool.append(texts[-1][0], run)
        naive.add(prompt, run)
        texts[-1][1].extend(run)
    source = repetitive(rng, 400)
    for _ in range(60):
        sequence, text = rng.choice(texts)
        at = rng.randrange(390)
        run = source[at : at + rng.randint(1, 8)]
        pool.append(sequence, run)
        naive.add(text, run)
        text.extend(run)
    for context, after in naive.follow.items():
        for token in range(V):
            assert pool.count([*context, token]) == after.get(token, 0)
    for _ in range(300):
        string = [rng.randrange(V) for _ in range(rng.randint(1, depth + 1))]
        assert pool.count(string) == naive.count(string)


@pytest.mark.parametrize("seed", range(3))
def test_drafts_equal_a_naive_reference_with_keyed_noise(seed: int) -> None:
    rng = random.Random(seed)
    table = Table(depth=rng.randint(1, 6))
    strategy = DraftStrategy("suffix", 5)
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


def test_drafts_end_at_their_lengths_and_at_the_least_acceptance() -> None:
    table, rng = Table(), random.Random(2)
    for order in range(4):
        table.admit(make_request(order, [1, 2], [0]))
    table.extend([repetitive(rng, 200) for _ in range(4)])
    lengths = [0, 3, 6, 1]
    full = table.propose(DraftStrategy("suffix", 6), lengths)
    assert (full.counts <= lengths).all() and full.counts[3] == 1
    cut = table.propose(DraftStrategy("suffix", 6, 0.15), lengths)
    assert 0 < cut.num_tokens < full.num_tokens and (cut.cumulative_acceptance >= 0.15).all()
