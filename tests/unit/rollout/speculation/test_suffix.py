"""The suffix drafter against a reference in plain Python: under preemption, with history, bounded memory, bad input."""

from __future__ import annotations

import random

import numpy as np
import pytest

from megatron_tlt.errors import BackendError, ConfigError
from megatron_tlt.models.decoders.native.suffix_abi import BAD_HANDLE, BAD_TOKEN, NO_MEMORY, STEPS
from megatron_tlt.rollout.speculation import suffix
from megatron_tlt.rollout.speculation.history import ResponseHistory
from megatron_tlt.types import DraftStrategy, PastResponse, SamplingParams
from tests.helpers.suffix_tables import CHAIN, Pool, Table, V, check_against_naive, make_request, repetitive


@pytest.mark.parametrize("seed", range(6))
def test_drafts_equal_a_naive_reference_with_keyed_noise(seed: int) -> None:
    rng = random.Random(seed)
    table = Table(depth=rng.randint(1, 7))
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


def test_a_node_of_many_children_drafts_the_most_frequent_and_a_list_of_candidates_ends_at_16() -> None:
    """The second of ten children is the last one of their list until its count has moved it to the front."""
    table = Table(depth=1, vocab=64)
    once = [token for child in range(10, 20) for token in (5, child)]
    table.admit(make_request(0, [1], [*once, *[5, 11] * 20, 5], temperature=0.0))
    assert table.propose(lengths=[1]).tokens.tolist() == [11]
    table = Table(depth=3, vocab=64)
    behind: list[int] = []  # children 10 to 17 of the longest context, which ends the text, 20 to 27 and 30 to 37
    for start, before in ((10, [1, 2, 3]), (20, [4, 2, 3]), (30, [4, 5, 3])):
        behind += [token for child in range(start, start + 8) for token in (*before, child)]
    table.admit(make_request(0, [6], [*behind, 1, 2, 3], temperature=0.0))
    draft = table.propose(lengths=[1])
    # 10, alone in all three lists, has a share of 1 in 12; by a context of 3 tokens and at least 9 candidates.
    assert (draft.tokens.tolist(), draft.feature.tolist()) == ([10], [STEPS + 4])


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
    """Every call's requests are read to their end, so a call's memory is free again behind it."""
    table, rng, lengths, drafted = Table(depth=12, mib=1), np.random.default_rng(0), [], 0
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
        known = [table.drafter._sequences[request.order] for request in requests]
        lengths.append([table.drafter._lib.tlt_suffix_length(table.drafter._pool, *each) for each in known])
        for request in requests:
            table.stop(request)
        table.drafter.end_generate()
    assert lengths == [[5001, 5001]] * 6 and drafted > 1000
    pool = Pool(12, max_bytes=1 << 20)  # in which the texts alone, 320 KiB, would fit
    assert pool.append(pool.sequence(), rng.integers(0, V, 1 << 14)) == 0
    assert pool.append(pool.sequence(), np.zeros(1 << 16)) == NO_MEMORY


@pytest.mark.parametrize("period", [1, 2, 13])
def test_text_that_repeats_itself_takes_few_nodes(period: int) -> None:
    """Beside the text 64 KiB are enough, some 1,000 nodes: as much text again still fits."""
    n = 1 << 17
    pool = Pool(12, vocab=1000, max_bytes=2 * 4 * n + (1 << 16))
    text = (np.arange(n) % period).astype(np.int32)
    first, second = pool.sequence(), pool.sequence()
    assert pool.append(first, text) == 0
    assert pool.append(second, text) == 0


def test_random_text_takes_two_nodes_a_token() -> None:
    """A text of 4 MiB still fits behind it into 6.5 MiB; with nodes of all 12 lengths 8 MiB would be too few."""
    pool = Pool(12, vocab=1000, max_bytes=13 << 19)
    assert pool.append(pool.sequence(), np.random.default_rng(0).integers(0, 1000, 1 << 14)) == 0
    assert pool.append(pool.sequence(), np.zeros(1 << 20)) == 0


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
    for _ in range(400):
        draft = table.propose()
        table.drafter.observe(draft, np.ones(draft.num_tokens, bool), np.zeros(draft.num_tokens, bool))
    assert table.propose().cumulative_acceptance[0] < 0.5


def test_configuration_that_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "find_compiler", lambda: None)
    with pytest.raises(ConfigError, match=r"rollout\.speculation\.drafter.*C compiler"):
        Table()
