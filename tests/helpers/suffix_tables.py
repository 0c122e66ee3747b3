"""Suffix drafters outside an engine: the C functions with Python's arguments, a table of running requests, and the
drafter in plain Python, from its description: dictionaries from contexts to counts, no tries, no C.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from megatron_tlt.config.speculation import SuffixSection
from megatron_tlt.models.decoders.draft import Draft
from megatron_tlt.models.decoders.keys import TOKEN_STEP, mix, row_keys
from megatron_tlt.models.decoders.native.abi import library
from megatron_tlt.models.decoders.native.suffix_abi import ODDS, STEPS
from megatron_tlt.rollout.request import Request
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.speculation import suffix
from megatron_tlt.rollout.speculation.history import ResponseHistory
from megatron_tlt.types import DraftStrategy, SamplingParams

V = 7  # few enough that no list of candidates is cut
CHAIN = DraftStrategy("suffix", 6)


class Pool:
    """The C functions, with Python's arguments."""

    def __init__(self, depth: int, vocab: int = V, max_bytes: int = 1 << 26):
        self.lib = library()
        self.pool = self.lib.tlt_suffix_new(depth, vocab, max_bytes)
        self.trie = self.lib.tlt_suffix_trie(self.pool)

    def sequence(self, after: int = -1) -> int:
        return self.lib.tlt_suffix_sequence(self.pool, self.trie, after)

    def append(self, sequence: int, tokens: list[int] | np.ndarray) -> int:
        array = np.asarray(tokens, np.int32)
        return self.lib.tlt_suffix_append(self.pool, self.trie, sequence, array.ctypes.data, len(array))

    def __del__(self) -> None:
        self.lib.tlt_suffix_free(self.pool)


class Table:
    """A drafter with its rows, fed by hand; `naive` follows along."""

    def __init__(self, depth: int = 4, history: ResponseHistory | None = None, mib: int = 64, vocab: int = V):
        self.rows = RunningRows(8, 64, 4, vocab, max_output=1 << 14)
        with pytest.MonkeyPatch.context() as shallow:
            shallow.setattr(suffix, "_DEPTH", depth)
            self.drafter = suffix.SuffixDrafter(SuffixSection(history_mib=mib), self.rows, history)
        self.naive: dict[str, NaiveCounts] = {}
        self.depth = depth

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
        self.naive[request.dataset_id].add(prompt, request.output)

    def stop(self, request: Request) -> None:
        self.rows.stop(request)
        self.drafter.finish(request)

    def text(self, row: int) -> list[int]:
        request = self.rows.requests[row]
        length = int(self.rows.output_len[row])
        return request.prompt.tolist() + self.rows.outputs[request.slot, :length].tolist()

    def extend(self, runs: list[list[int]]) -> None:
        for request, run in zip(self.rows.requests, runs, strict=True):
            self.naive[request.dataset_id].add(self.text(request.row), run)
        tokens = np.array([t for run in runs for t in run], np.int32)
        counts = np.array([len(run) for run in runs], np.int32)
        self.rows.advance_many(tokens, np.zeros(len(tokens), np.float32), counts, 16)

    def propose(self, strategy: DraftStrategy = CHAIN, lengths: list[int] | None = None) -> Draft:
        self.drafter.sync_context(self.rows)
        wanted = lengths if lengths is not None else [strategy.draft_len] * self.rows.num_rows
        return self.drafter.propose(self.rows, np.array(wanted, np.int32), strategy)


def make_request(
    order: int, prompt: list[int], output: list[int], temperature: float = 1.0, name: str = "q"
) -> Request:
    params = SamplingParams(temperature=temperature, max_tokens=400, seed=3)
    request = Request(np.array(prompt, np.int32), params, order // 4, order % 4, order, frozenset(), dataset_id=name)
    request.output, request.logprobs = list(output), [0.0] * len(output)
    return request


def repetitive(rng: random.Random, length: int) -> list[int]:
    """Random text with phrases that come again."""
    phrases = [[rng.randrange(V) for _ in range(rng.randint(1, 6))] for _ in range(3)]
    text: list[int] = []
    while len(text) < length:
        text += rng.choice(phrases) if rng.random() < 0.8 else [rng.randrange(V)]
    return text[:length]


def check_against_naive(table: Table, draft: Draft, strategy: DraftStrategy) -> int:
    """Every token and its kind, from the naive distribution. Returns how many were compared."""
    at, rates = 0, table.drafter._calibration.rates
    for row, request in enumerate(table.rows.requests):
        count = int(draft.counts[row])
        text = table.text(row)
        cumulative_acceptance = 1.0
        for place, i in enumerate(range(at, at + count)):
            shares, longest = distribution(table.naive[request.dataset_id], text)
            position = int(table.rows.output_len[row]) + place
            noisy = request.params.temperature > 0
            ranked = ranking(shares, request.key, position, noisy)
            score = {t: s for s, t in ranked}
            assert score[int(draft.tokens[i])] >= ranked[0][0] - 1e-4, "not the best candidate"
            context = sum(longest >= bound for bound in (3, 5, 8, 12))
            size = sum(len(shares) >= bound for bound in (2, 3, 5, 9))
            share = shares[int(draft.tokens[i])]
            odds = math.log(share / max(1 - share, 1e-4)) + 2
            near = {min(max(int(odds + d), 0), ODDS - 1) for d in (-1e-4, 1e-4)}
            assert divmod(draft.feature[i], STEPS * STEPS) in {(o, context * STEPS + size) for o in near}
            cumulative_acceptance *= float(rates[draft.feature[i]])
            assert draft.cumulative_acceptance[i] == pytest.approx(cumulative_acceptance, rel=1e-5)
            text.append(int(draft.tokens[i]))
        if count < strategy.draft_len:
            assert not distribution(table.naive[request.dataset_id], text)[0], "stopped too early"
        at += count
    return at


NEGLIGIBLE = 0.0313


def gumbel(request_key: int, position: int, token: int) -> float:
    """The policy's noise, in double precision."""
    key = int(row_keys(np.array([request_key], np.uint64), np.array([position]))[0])
    z = mix(np.array([(key + (token + 1) * TOKEN_STEP) & ((1 << 64) - 1)], np.uint64))
    return -math.log(-math.log(((int(z[0]) >> 40) + 0.5) / (1 << 24)))


@dataclass
class NaiveCounts:
    """What followed each context of at most `depth` tokens."""

    depth: int
    follow: dict[tuple[int, ...], dict[int, int]] = field(default_factory=dict)

    def add(self, before: list[int], tokens: list[int]) -> None:
        """Counts `tokens`, which stand behind `before`."""
        text = before + tokens
        for i in range(len(before), len(text)):
            for length in range(min(self.depth, i) + 1):
                after = self.follow.setdefault(tuple(text[i - length : i]), {})
                after[text[i]] = after.get(text[i], 0) + 1


def distribution(counts: NaiveCounts, text: list[int]) -> tuple[dict[int, float], int]:
    """Shares of the candidates behind `text`, and the longest context that something followed."""
    shares: dict[int, float] = {}
    rest, longest = 1.0, 0
    for length in range(min(counts.depth, len(text)), 0, -1):
        after = counts.follow.get(tuple(text[-length:]))
        if after is None or rest <= NEGLIGIBLE:
            continue
        longest = max(longest, length)
        unit = rest / (sum(after.values()) + len(after))
        for token, count in after.items():
            shares[token] = shares.get(token, 0.0) + unit * count
        rest = unit * len(after)
    return shares, longest


def ranking(shares: dict[int, float], key: int, position: int, noisy: bool) -> list[tuple[float, int]]:
    """(score, token) of all candidates, best first, the smaller token among equals."""
    noise = {t: gumbel(key, position, t) if noisy and len(shares) > 1 else 0.0 for t in shares}
    return sorted(((math.log(s) + noise[t], t) for t, s in shares.items()), key=lambda x: (-x[0], x[1]))
