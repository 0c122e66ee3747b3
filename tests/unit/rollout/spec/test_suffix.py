"""The suffix drafter against its description in plain Python, and in all that befalls it in an engine."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from megatron_tlt.config.speculation import SuffixSection
from megatron_tlt.errors import BackendError, ConfigError
from megatron_tlt.models.native import keyed_sample
from megatron_tlt.models.suffix_abi import (
    BAD_HANDLE,
    BAD_TOKEN,
    FEATURES,
    NO_MEMORY,
    STEPS,
    TRUNK,
    suffix_library,
)
from megatron_tlt.rollout.keys import row_keys
from megatron_tlt.rollout.request import Request
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.spec import suffix
from megatron_tlt.rollout.spec.draft import Draft
from megatron_tlt.rollout.spec.history import AnswerHistory
from megatron_tlt.rollout.spec.suffix import SuffixDrafter
from megatron_tlt.rollout.spec.suffix_rates import MatchRates
from megatron_tlt.types import DraftStrategy, PastAnswer, SamplingParams
from tests.helpers.naive_suffix import NaiveCounts, distribution, ranking

V = 7  # few enough that no list of candidates is cut
CHAIN = DraftStrategy("suffix", 6)


class Pool:
    """The C functions, with Python's arguments."""

    def __init__(self, depth: int, vocab: int = V, max_bytes: int = 1 << 26):
        self.lib = suffix_library()
        self.pool = self.lib.tlt_suffix_new(depth, vocab, max_bytes)
        self.trie = self.lib.tlt_suffix_trie(self.pool)

    def sequence(self, after: int = -1, weight: int = 1) -> int:
        return self.lib.tlt_suffix_sequence(self.pool, self.trie, after, weight)

    def append(self, sequence: int, tokens: list[int] | np.ndarray) -> int:
        array = np.asarray(tokens, np.int32)
        return self.lib.tlt_suffix_append(self.pool, self.trie, sequence, array.ctypes.data, len(array))

    def count(self, string: list[int]) -> int:
        array = np.asarray(string, np.int32)
        return self.lib.tlt_suffix_count(self.pool, self.trie, array.ctypes.data, len(array))

    @property
    def nodes(self) -> int:
        return self.lib.tlt_suffix_nodes(self.pool, self.trie)

    @property
    def bytes(self) -> int:
        return self.lib.tlt_suffix_bytes(self.pool)

    def __del__(self) -> None:
        self.lib.tlt_suffix_free(self.pool)


class Table:
    """A drafter with its rows, fed by hand; `naive` follows along."""

    def __init__(
        self, depth: int = 4, history: AnswerHistory | None = None, mib: int = 64, coupled: bool = True
    ):
        self.rows = RunningRows(8, 64, 4, V)
        section = SuffixSection(depth=depth, history_mib=mib)
        self.drafter = SuffixDrafter(section, self.rows, history, coupled)
        self.naive: dict[str, NaiveCounts] = {}
        self.common = NaiveCounts(depth)
        self.depth = depth
        self.tail = min(4, depth)  # what the common trie sees of a prompt

    def start(self, request: Request) -> None:
        self.rows.start(request, [0], len(request.prompt), 0)
        self.drafter.start(request)

    def admit(self, request: Request) -> None:
        """Starts a request for the first time, also for `naive`."""
        self.start(request)
        prompt = request.prompt.tolist()
        if request.dataset_id not in self.naive:
            self.naive[request.dataset_id] = NaiveCounts(self.depth)
            self.naive[request.dataset_id].add([], prompt)
            self.common.add([], prompt[-self.tail :])
        self.naive[request.dataset_id].add(prompt, request.output)
        self.common.add(prompt[-self.tail :], request.output)

    def stop(self, request: Request) -> None:
        self.drafter.stop(request)
        self.rows.stop(request)

    def text(self, row: int) -> list[int]:
        request = self.rows.requests[row]
        length = int(self.rows.output_len[row])
        return request.prompt.tolist() + self.rows.outputs[request.slot, :length].tolist()

    def extend(self, runs: list[list[int]]) -> None:
        for request, run in zip(self.rows.requests, runs, strict=True):
            text = self.text(request.row)
            self.naive[request.dataset_id].add(text, run)
            self.common.add(text[max(0, len(request.prompt) - self.tail) :], run)
        tokens = np.array([t for run in runs for t in run], np.int32)
        counts = np.array([len(run) for run in runs], np.int32)
        self.drafter.extend(self.rows, tokens, counts)
        self.rows.advance_many(tokens, np.zeros(len(tokens), np.float32), counts, 16)

    def propose(self, strategy: DraftStrategy = CHAIN, lengths: list[int] | None = None) -> Draft:
        wanted = lengths if lengths is not None else [strategy.draft_len] * self.rows.num_rows
        return self.drafter.propose(self.rows, np.array(wanted, np.int32), strategy)


def make_request(
    order: int, prompt: list[int], output: list[int], temperature: float = 1.0, name: str = "q"
) -> Request:
    params = SamplingParams(temperature=temperature, max_tokens=400, seed=3)
    request = Request(
        np.array(prompt, np.int32), params, order // 4, order % 4, order, frozenset(), dataset_id=name
    )
    request.output, request.logprobs = list(output), [0.0] * len(output)
    return request


def repetitive(rng: random.Random, length: int) -> list[int]:
    """Random text with phrases that come again."""
    phrases = [[rng.randrange(V) for _ in range(rng.randint(1, 6))] for _ in range(3)]
    text: list[int] = []
    while len(text) < length:
        text += rng.choice(phrases) if rng.random() < 0.8 else [rng.randrange(V)]
    return text[:length]


@pytest.mark.parametrize("seed", range(12))
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


def check_against_naive(table: Table, draft: Draft, strategy: DraftStrategy, noisy_ok: bool = True) -> int:
    """Every node's token, depth, parent and kind, from the naive distribution. Returns how many were compared."""
    at, rates = 0, table.drafter._calibration.rates
    for row, request in enumerate(table.rows.requests):
        count = int(draft.counts[row])
        nodes = range(at, at + count)
        trunk = [i for i in nodes if i - at == draft.depths[i] - 1]
        text, hidden = table.text(row), max(0, len(request.prompt) - table.tail)
        siblings = []
        survival = 1.0
        for place, i in enumerate(trunk):
            shares, longest = distribution(table.naive[request.dataset_id], table.common, text, hidden)
            position = int(table.rows.output_len[row]) + place
            noisy = noisy_ok and request.params.temperature > 0
            ranked = ranking(shares, request.key, position, noisy)
            score = {t: s for s, t in ranked}
            assert score[int(draft.tokens[i])] >= ranked[0][0] - 1e-4, "not the best candidate"
            context = sum(longest >= bound for bound in (3, 5, 8, 12))
            size = sum(len(shares) >= bound for bound in (2, 3, 5, 9))
            assert draft.feature[i] % (STEPS * STEPS) == context * STEPS + size
            rate = float(rates[draft.feature[i]])
            for rank, (s, _) in list(enumerate(ranked))[1 : strategy.topk]:
                siblings.append(
                    (
                        place + 1,
                        place - 1,
                        s,
                        survival * float(rates[TRUNK + (rank - 1) * 8 + min(7, int(rate * 8))]),
                    )
                )
            survival *= rate
            assert draft.survival[i] == pytest.approx(survival, rel=1e-5)
            text.append(int(draft.tokens[i]))
            for k in range(at + len(trunk), at + count):
                if draft.depths[k] == place + 1:
                    assert (
                        draft.tokens[k] in [t for _, t in ranked[1 : strategy.topk]]
                        or abs(ranked[0][0] - ranked[-1][0]) < 1e-3
                    )
        if len(trunk) < strategy.draft_len:
            assert not distribution(table.naive[request.dataset_id], table.common, text, hidden)[0], (
                "stopped too early"
            )
        assert count - len(trunk) == len(siblings)
        for i, (depth, parent, _, survives) in zip(range(at + len(trunk), at + count), siblings, strict=True):
            assert draft.depths[i] == depth
            assert draft.parents is not None
            assert draft.parents[i] == parent
            assert draft.survival[i] == pytest.approx(survives, rel=1e-5)
        at += count
    return at


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("seed", range(6))
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


def test_a_draft_is_what_the_policy_would_draw_from_the_drafters_distribution() -> None:
    """The noise is the policy's own: its sampler, given the shares as logits, draws the drafted tokens."""
    table, rng = Table(depth=3), random.Random(5)
    table.admit(make_request(0, [1, 2, 3], [0]))
    table.extend([repetitive(rng, 200)])
    agreed = 0
    for _ in range(150):
        draft = table.propose(DraftStrategy("suffix", 1))
        text = table.text(0)
        shares, _ = distribution(table.naive["q"], table.common, text, 0)
        logits = torch.full((1, V), -torch.inf)
        for token, share in shares.items():
            logits[0, token] = np.log(share)
        keys = row_keys(table.rows.keys[:1], table.rows.output_len[:1])
        drawn, _ = keyed_sample(logits, torch.ones(1), torch.from_numpy(keys))
        agreed += int(drawn[0]) == int(draft.tokens[0])
        table.extend([[rng.randrange(V)]])
    assert agreed == 150


def test_uncoupled_drafts_do_not_know_the_noise() -> None:
    drafts = []
    for seed in (3, 4):
        table, rng = Table(coupled=False), random.Random(0)
        request = make_request(0, [1, 2], [0])
        request.params = SamplingParams(max_tokens=400, seed=seed)
        table.admit(request)
        table.extend([repetitive(rng, 200)])
        draft = table.propose()
        check_against_naive(table, draft, CHAIN, noisy_ok=False)
        drafts.append(draft.tokens.tolist())
    assert drafts[0] == drafts[1]


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
            depths, parents, survival = draft.depths[nodes], draft.parents[nodes], draft.survival[nodes]
            trunk = int(depths.max(initial=0))
            assert trunk <= lengths[row]
            assert depths[:trunk].tolist() == list(range(1, trunk + 1))
            assert parents[:trunk].tolist() == list(range(-1, trunk - 1))
            for i in range(count):
                assert parents[i] < i
                assert depths[i] == (depths[parents[i]] + 1 if parents[i] >= 0 else 1)
                assert parents[i] < 0 or survival[i] <= survival[parents[i]]
            if strategy.num_verify_tokens:
                assert count <= 5
            assert (survival >= strategy.min_survival).all()
            at += count
    # What a smaller budget leaves are the nodes most likely to be emitted.
    best = np.sort(full.survival[: full.counts[1]])[::-1][:3]
    small = table.propose(DraftStrategy("suffix", 6, 3, 4), lengths)
    assert np.sort(small.survival[: small.counts[1]])[::-1] == pytest.approx(best)


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
            if number and step % 7 == 3:
                table.stop(requests[step % 2])
                table.start(requests[step % 2])
    counts = [
        [t.drafter._lib.tlt_suffix_nodes(t.drafter._pool, q.trie) for q in t.drafter._questions.values()]
        for t in tables
    ]
    assert counts[0] == counts[1]
    for table in tables:
        assert check_against_naive(table, table.propose(), CHAIN) > 0


def test_a_request_that_went_on_elsewhere_catches_up() -> None:
    """Its output grew while it had no row here: `start` reads the rest."""
    table = Table()
    request = make_request(0, [1, 2, 3], [0])
    table.admit(request)
    table.extend([[4, 5, 4, 5]])
    table.stop(request)
    table.naive["q"].add([1, 2, 3, *request.output], [6, 4, 5])
    table.common.add([1, 2, 3, *request.output], [6, 4, 5])
    request.output += [6, 4, 5]
    request.logprobs += [0.0] * 3
    table.start(request)
    assert check_against_naive(table, table.propose(), CHAIN) > 0


def test_siblings_history_and_prompt_are_read() -> None:
    history = AnswerHistory(2, 4, 1)
    history.remember([PastAnswer("q", np.array([0, 5, 5, 6], np.int32), 1.0, 9)])
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


def test_better_answers_weigh_more() -> None:
    history = AnswerHistory(1, 4, 1)
    answers = [
        PastAnswer("q", np.array([0, t, t], np.int32), s, 9) for t, s in ((4, 0.0), (5, 1.0), (6, 0.5))
    ]
    history.remember(answers)
    assert suffix._weights(history.of("q")) == [3, 2, 1]
    assert suffix._weights(answers[:1] * 3) == [2, 2, 2]
    assert suffix._weights([PastAnswer("q", np.empty(0, np.int32), np.nan, 1), *answers]) == [2] * 4
    table = Table(history=history)
    table.start(make_request(0, [1, 2, 3], [0], temperature=0.0))
    assert table.propose().tokens.tolist()[:2] == [5, 5]


def test_after_a_call_the_form_of_answers_is_still_known() -> None:
    table = Table(depth=6)
    first = make_request(0, [1, 2, 3], [0], name="one")
    table.admit(first)
    table.extend([[4, 5, 6, 5, 4]])
    before = table.drafter.num_bytes
    table.stop(first)
    table.drafter.end_generate()
    assert table.drafter.num_bytes < before
    table.start(make_request(0, [6, 6, 2, 3], [0], temperature=0.0, name="two"))
    assert table.propose().tokens.tolist()[:5] == [4, 5, 6, 5, 4]


def test_memory_stays_in_its_bounds_and_nothing_breaks() -> None:
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
            table.drafter.extend(table.rows, tokens, counts)
            table.rows.advance_many(tokens, np.zeros(200, np.float32), counts, 1 << 14)
            draft = table.propose()
            drafted += draft.num_nodes
            peak = max(peak, table.drafter.num_bytes)
        for request in requests:
            table.stop(request)
        table.drafter.end_generate()
    assert 700_000 < peak <= 1 << 20
    assert table.drafter.num_bytes < 1 << 19
    assert drafted > 1000


def test_a_renewed_trie_keeps_the_newest_half() -> None:
    pool, naive = Pool(5), NaiveCounts(5)
    rng = random.Random(0)
    texts = [repetitive(rng, 100) for _ in range(10)]
    for text in texts:
        base = pool.sequence()
        pool.append(base, text[:10])
        pool.append(pool.sequence(base), text[10:])
    assert pool.lib.tlt_suffix_renew(pool.pool, pool.trie) == 10
    for text in texts[5:]:
        naive.add([], text[:10])
        naive.add(text[:10], text[10:])
    for context, after in naive.follow.items():
        for token in range(V):
            assert pool.count([*context, token]) == after.get(token, 0)
    before = pool.bytes
    pool.lib.tlt_suffix_drop(pool.pool, pool.trie)
    assert pool.bytes == 0 < before


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
    for bad in (-1, V, 1 << 30):
        with pytest.raises(BackendError, match="outside the vocabulary"):
            table.drafter.extend(table.rows, np.array([4, bad], np.int32), np.array([2], np.int32))
    assert table.propose().tokens.tolist() == before
    with pytest.raises(BackendError, match="outside the vocabulary"):
        table.start(make_request(1, [1, V], [0], name="other"))
    pool = Pool(3)
    assert pool.append(pool.sequence(), [V]) == BAD_TOKEN
    assert pool.append(99, [1]) == BAD_HANDLE
    assert pool.sequence(after=55) == BAD_HANDLE
    assert Pool(3, max_bytes=10).trie == NO_MEMORY


def test_equal_calls_give_equal_drafts() -> None:
    def play() -> list[list[int]]:
        rng, table, seen = random.Random(7), Table(), []
        for order in range(6):
            table.admit(make_request(order, [1, 2, order % 3], [0], name=str(order % 3)))
        for _ in range(30):
            draft = table.propose(DraftStrategy("suffix", 4, 2))
            seen.append([*draft.counts.tolist(), *draft.tokens.tolist(), *draft.feature.tolist()])
            accepted = np.array([rng.random() < 0.5 for _ in range(draft.num_nodes)], bool)
            table.drafter.observe(draft, np.ones(draft.num_nodes, bool), accepted)
            table.extend([repetitive(rng, rng.randint(1, 4)) for _ in range(6)])
        return seen

    assert play() == play()


def test_survival_learns_from_verdicts() -> None:
    table, rng = Table(), random.Random(0)
    table.admit(make_request(0, [1, 2], [0]))
    table.extend([repetitive(rng, 200)])
    first = table.propose()
    for _ in range(200):
        draft = table.propose()
        everything = np.ones(draft.num_nodes, bool)
        table.drafter.observe(draft, everything, everything)
    assert table.propose().survival[-1] > max(0.85, float(first.survival[-1]))
    learned = table.drafter.state_dict()
    for _ in range(400):
        draft = table.propose()
        table.drafter.observe(draft, np.ones(draft.num_nodes, bool), np.zeros(draft.num_nodes, bool))
    assert table.propose().survival[0] < 0.5
    table.drafter.load_state_dict(learned)
    assert table.propose().survival[-1] > 0.85


def test_match_rates_start_sensibly_and_fade() -> None:
    rates = MatchRates()
    kinds = rates.rates[:TRUNK].reshape(-1, STEPS, STEPS)
    assert kinds[-1, -1, 0] > 0.95  # one candidate behind a long context
    assert kinds[0, 0, -1] < 0.1  # one of many behind a short one
    assert (np.diff(kinds, axis=0) > 0).all()
    assert rates.rates.shape == (FEATURES,)
    assert (rates.rates > 0).all()
    assert (rates.rates < 1).all()
    for matched in (True, False):
        for _ in range(100):
            rates.observe(np.full(128, 7), np.ones(128, bool), np.full(128, matched))
    assert rates.rates[7] < 0.4  # the older half of the verdicts weighs less
    with pytest.raises(ValueError, match="match counts"):
        rates.load_state_dict({"tried": [1.0], "matched": [1.0]})


def test_configuration_that_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.speculation\.suffix\.depth"):
        Table(depth=65)
    monkeypatch.setattr(suffix, "find_compiler", lambda: None)
    with pytest.raises(ConfigError, match=r"rollout\.speculation\.drafter.*C compiler"):
        Table()
