"""The suffix drafter against a reference in plain Python: under preemption, with history, bounded memory, bad input."""

from __future__ import annotations

import random

import numpy as np
import pytest

from megatron_tlt.errors import BackendError, ConfigError
from megatron_tlt.models.decoders.native.suffix_abi import (
    BAD_HANDLE,
    BAD_TOKEN,
    NO_MEMORY,
)
from megatron_tlt.rollout.speculation import suffix
from megatron_tlt.rollout.speculation.history import ResponseHistory
from megatron_tlt.types import DraftStrategy, PastResponse, SamplingParams
from tests.helpers.suffix_tables import (
    CHAIN,
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


def test_a_preempted_request_is_not_read_twice() -> None:
    rng = random.Random(1)
    runs = [[repetitive(rng, rng.randint(1, 4)) for _ in range(2)] for _ in range(40)]
    tables = [Table(), Table()]
    for number, table in enumerate(tables):
        requests = [make_request(i, [1, 2, 3], [i]) for i in range(2)]
        for request in requests:
            table.admit(request)
        for step, run in enumerate(runs):
            by_request = dict(zip(requests, run, strict=True))
            table.extend([by_request[r] for r in table.rows.requests])
            table.drafter.sync_context(table.rows)
            if number and step % 7 == 3:
                table.stop(requests[step % 2])
                table.start(requests[step % 2])
    counts = [
        [t.drafter._lib.tlt_suffix_nodes(t.drafter._pool, trie) for trie, _ in t.drafter._prompts.values()]
        for t in tables
    ]
    assert counts[0] == counts[1]
    for table in tables:
        assert check_against_naive(table, table.propose(), CHAIN) > 0


def test_tokens_of_plain_steps_are_read_before_the_next_draft() -> None:
    """Also when a request has finished in between."""
    rng, table = random.Random(2), Table()
    requests = [make_request(i, [1, 2, 3], [i]) for i in range(3)]
    for request in requests:
        table.admit(request)
    for step in range(60):
        table.extend([repetitive(rng, rng.randint(0, 3)) or [1] for _ in table.rows.requests])
        if step == 20:  # nothing was drafted yet
            table.stop(requests[1])
        if step in (30, 59):
            assert check_against_naive(table, table.propose(), CHAIN) > 0
    lengths = [
        table.drafter._lib.tlt_suffix_length(table.drafter._pool, *table.drafter._sequences[r.order]) for r in requests
    ]
    assert lengths[1] == len(requests[1].output) > 20
    assert [lengths[r.order] for r in table.rows.requests] == table.rows.output_len[:2].tolist()


def test_siblings_history_and_prompt_are_read() -> None:
    history = ResponseHistory(2, 4, 1)
    history.remember([PastResponse("q", np.array([0, 5, 5, 6], np.int32), 1.0, 9)])
    past = Table(history=history)
    past.start(make_request(0, [1, 2, 3], [0]))
    assert past.propose().tokens.tolist() == [5, 5, 6]
    sibling = Table()
    sibling.admit(make_request(0, [1, 2, 3], [0]))
    sibling.extend([[4, 6, 6, 1]])
    sibling.admit(make_request(1, [1, 2, 3], [0]))
    draft = sibling.propose(lengths=[0, 4])
    assert draft.tokens.tolist() == [4, 6, 6, 1]
    prompt = Table()
    prompt.admit(make_request(0, [1, 2, 3, 4, 5, 6], [2]))
    assert prompt.propose(lengths=[4]).tokens.tolist() == [3, 4, 5, 6]


def test_memory_is_bounded() -> None:
    table, rng = Table(depth=12, mib=1), np.random.default_rng(0)
    peak, drafted = 0, 0
    for call in range(6):
        requests = [make_request(4 * call + i, [1, 2, 3], [0], name=str(i)) for i in range(2)]
        for request in requests:
            request.params = SamplingParams(max_tokens=1 << 14)
            table.start(request)
        for _ in range(50):
            tokens = rng.integers(0, V, 200).astype(np.int32)
            counts = np.array([100, 100], np.int32)
            table.rows.advance_many(tokens, np.zeros(200, np.float32), counts, 1 << 14)
            draft = table.propose()
            drafted += draft.num_tokens
            peak = max(peak, table.drafter.num_bytes)
        for request in requests:
            table.stop(request)
        table.drafter.end_generate()
    assert 700_000 < peak <= 1 << 20
    assert table.drafter.num_bytes == 0
    assert drafted > 1000


@pytest.mark.parametrize("name", ["same", "alternating", "period", "random"])
def test_adversarial_text_costs_no_more_than_other(name: str) -> None:
    n = 100_000
    pool = Pool(12, vocab=1000)
    text = {
        "same": np.zeros(n),
        "alternating": np.arange(n) % 2,
        "period": np.arange(n) % 13,
        "random": np.random.default_rng(0).integers(0, 1000, n),
    }[name].astype(np.int32)
    sequence = pool.sequence()
    assert pool.append(sequence, text) == 0
    assert pool.nodes <= 2 * n
    if name == "same":
        assert pool.nodes == 14  # the root and one node a length
        assert pool.count([0] * 13) == n - 12
    if name == "alternating":
        assert pool.count([0, 1]) == n // 2
        assert pool.nodes <= 2 * 13 + 1
    assert pool.append(sequence, text[:1]) == 0


def test_invalid_input_is_refused_and_changes_nothing() -> None:
    table = Table()
    table.admit(make_request(0, [1, 2, 3], [0]))
    before = table.propose().tokens.tolist()
    num_read = table.drafter._arrays.num_read.copy()
    for bad in (-1, V, 1 << 30):
        table.rows.outputs[table.rows.slots[0], 1:3] = 4, bad
        table.rows.output_len[0] = 3
        with pytest.raises(BackendError, match="outside the vocabulary"):
            table.drafter.sync_context(table.rows)
        assert (table.drafter._arrays.num_read == num_read).all()
        table.rows.output_len[0] = 1
    assert table.propose().tokens.tolist() == before
    table.start(make_request(1, [1, V], [0], name="other"))
    for _ in range(2):
        with pytest.raises(BackendError, match="outside the vocabulary"):
            table.propose()
    pool = Pool(3)
    assert pool.append(pool.sequence(), [V]) == BAD_TOKEN
    assert pool.append(99, [1]) == BAD_HANDLE
    assert pool.sequence(after=55) == BAD_HANDLE
    assert Pool(3, max_bytes=10).trie == NO_MEMORY


def test_cumulative_acceptance_learns_from_verdicts() -> None:
    table, rng = Table(), random.Random(0)
    table.admit(make_request(0, [1, 2], [0]))
    table.extend([repetitive(rng, 200)])
    first = table.propose()
    for _ in range(200):
        draft = table.propose()
        everything = np.ones(draft.num_tokens, bool)
        table.drafter.observe(draft, everything, everything)
    assert table.propose().cumulative_acceptance[-1] > max(0.85, float(first.cumulative_acceptance[-1]))
    learned = table.drafter.state_dict()
    for _ in range(400):
        draft = table.propose()
        table.drafter.observe(draft, np.ones(draft.num_tokens, bool), np.zeros(draft.num_tokens, bool))
    assert table.propose().cumulative_acceptance[0] < 0.5
    table.drafter.load_state_dict({"rates": {"tried": [1.0], "matched": [1.0]}})  # an earlier version's: ignored
    assert table.propose().cumulative_acceptance[0] < 0.5
    table.drafter.load_state_dict(learned)
    assert table.propose().cumulative_acceptance[-1] > 0.85


def test_configuration_that_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "find_compiler", lambda: None)
    with pytest.raises(ConfigError, match=r"rollout\.speculation\.drafter.*C compiler"):
        Table()
