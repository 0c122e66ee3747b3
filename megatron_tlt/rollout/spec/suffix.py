"""Drafts from how siblings and earlier responses continued: suffix tries in C (`models/native/csrc/suffix.h`).

Every prompt has a trie of its own over its prompt, the responses in progress (a request's own text too) and the
responses of earlier epochs, weighted by score. One more trie is common to all prompts and outlives `generate`: form is
alike in all responses, and a new prompt has nothing of its own yet. How both become a draft: `csrc/suffix_draft.c`.

Legend: B rows, N drafted tokens.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_tlt.config.speculation import SuffixSection
from megatron_tlt.errors import BackendError, ConfigError
from megatron_tlt.models.draft import Draft
from megatron_tlt.models.native.abi import library
from megatron_tlt.models.native.build import find_compiler
from megatron_tlt.models.native.suffix_abi import (
    MAX_DEPTH,
    MAX_LENGTH,
    NO_MEMORY,
    ODDS,
    STEPS,
    Ask,
    check,
)
from megatron_tlt.rollout.request import Request
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.spec.history import ResponseHistory
from megatron_tlt.rollout.spec.match_rates import MatchRates
from megatron_tlt.types import DraftStrategy, PastResponse

_NONE = -1
_TAIL = 4  # last prompt tokens that the common trie sees before a response
_COMMON_SHARE = 4  # the common trie takes at most this part of the memory
# A question's trie, its prompt's sequence there, and the sequence of the prompt's last tokens in the common trie.
_Question = tuple[int, int, int]


class SuffixDrafter:
    """A `rollout.spec.base.Drafter` that needs no model. Equal calls give equal drafts."""

    kind = "suffix"

    def __init__(self, section: SuffixSection, rows: RunningRows, history: ResponseHistory | None = None):
        """Drafts for `rows`. Its tries take at most `section.history_mib` MiB; then nothing more is added.

        Raises ConfigError without a C compiler, BackendError if the library cannot be built.
        """
        if find_compiler() is None:
            allowed = (
                "needs a C compiler: no cc, gcc or clang on PATH (install one, or choose another drafter)"
            )
            raise ConfigError.of("rollout.speculation.drafter", self.kind, allowed)
        assert section.depth <= MAX_DEPTH, "the configuration refuses it"
        self._lib, self._rows, self._history = library(), rows, history
        self._most_bytes = section.history_mib << 20
        self._pool = self._lib.tlt_suffix_new(section.depth, len(rows.is_stop), self._most_bytes)
        if not self._pool:
            raise BackendError("suffix drafter: no memory left")
        weakref.finalize(self, self._lib.tlt_suffix_free, self._pool)
        self._tail = min(_TAIL, section.depth)
        self._common = self._handle(self._lib.tlt_suffix_trie(self._pool))
        self._questions: dict[str | int, _Question] = {}
        self._sequences: dict[int, tuple[int, int, int, int]] = {}  # by Request.order: a row of `_handles`
        self._unread: dict[int, Request] = {}  # started since the last `sync_context`, by Request.order
        self._handles = np.full((len(rows.limit), 4), _NONE, np.int32)  # by slot
        self._num_read = np.zeros(len(rows.limit), np.int32)  # by slot: output tokens that are in the tries
        self._calibration = MatchRates(_prior(), strength=12.0, memory=65536.0)
        # C reads and writes these at fixed addresses: getting an array's address from numpy takes longer than a draft.
        self._counts, self._lengths = np.empty((2, len(rows.limit)), np.int32)
        self._read_at = self._num_read.ctypes.data
        self._outputs_at = rows.outputs.ctypes.data
        self._tokens, self._feature = np.empty((2, 0), np.int32)
        self._cumulative_acceptance = np.empty(0, np.float32)
        self._ask = self._make_ask()
        self._ask_at = ctypes.byref(self._ask)
        self._follow, self._propose = self._lib.tlt_suffix_follow, self._lib.tlt_suffix_propose

    @property
    def num_bytes(self) -> int:
        """Memory of the tries."""
        size: int = self._lib.tlt_suffix_bytes(self._pool)
        return size

    def start(self, request: Request) -> None:
        """See `Drafter.start`. Its tokens are read by `sync_context`: not at all in a rollout without drafts."""
        self._unread[request.order] = request

    def finish(self, request: Request) -> None:
        """See `Drafter.finish`. Its tokens stay in the tries, for its siblings."""
        if request.order in self._sequences and request.order not in self._unread:
            self._add(request)

    def sync_context(self, rows: RunningRows, strategy: DraftStrategy) -> None:
        """See `Drafter.sync_context`. Raises BackendError for a token outside the vocabulary; then no row is read."""
        assert rows is self._rows
        for request in self._unread.values():
            self._add(request)
        self._unread.clear()
        ask = self._ask
        drawn = ask.slots, ask.handles, self._read_at, ask.positions, self._outputs_at, rows.outputs.shape[1]
        check(self._follow(self._pool, rows.num_rows, *drawn))

    def _add(self, request: Request) -> None:
        """Adds a request's tokens to its tries, behind what they hold of it already. Mutates."""
        known = self._sequences.get(request.order)
        if known is None:
            trie, prompt, common = self._question(request)
            own, common = self._sequence(trie, prompt), self._sequence(self._common, common)
            self._sequences[request.order] = known = (trie, own, self._common, common)
        output = np.asarray(request.output, np.int32)
        for trie, sequence in (known[:2], known[2:]):
            if sequence != _NONE:
                have = self._lib.tlt_suffix_length(self._pool, trie, sequence)
                self._append(trie, sequence, output[have:])
        if request.slot >= 0:
            self._handles[request.slot] = known
            self._num_read[request.slot] = len(output)

    def propose(self, rows: RunningRows, lengths: np.ndarray, strategy: DraftStrategy) -> Draft:
        """See `Drafter.propose`."""
        assert rows is self._rows
        count, longest = rows.num_rows, min(strategy.draft_len, MAX_LENGTH)
        if count * longest > len(self._tokens):
            self._make_room(count * longest)
        self._lengths[:count] = lengths
        ask = self._ask
        ask.rows, ask.longest = count, longest
        ask.min_cumulative_acceptance = strategy.min_cumulative_acceptance
        total = check(self._propose(self._pool, self._ask_at))
        drafted = (self._tokens, self._cumulative_acceptance, self._feature)
        return Draft(self._counts[:count].copy(), *(column[:total].copy() for column in drafted))

    def observe(self, draft: Draft, reached: np.ndarray, accepted: np.ndarray) -> None:
        """See `Drafter.observe`."""
        if draft.num_tokens:
            assert draft.feature is not None
            self._calibration.observe(draft.feature[reached], accepted[reached])

    def end_generate(self) -> None:
        """See `Drafter.end_generate`. Drops the questions' tries, and the common one if it is large.

        Responses that were never read, because nothing was drafted, are not in it.
        """
        for trie, *_ in self._questions.values():
            self._lib.tlt_suffix_drop(self._pool, trie)
        self._questions.clear()
        self._sequences.clear()
        self._unread.clear()
        self._handles[:] = _NONE
        if _COMMON_SHARE * self.num_bytes > self._most_bytes:
            self._lib.tlt_suffix_drop(self._pool, self._common)
            self._common = self._handle(self._lib.tlt_suffix_trie(self._pool))

    def state_dict(self) -> dict[str, Any]:
        """Match rates. The tries are not part of it: they fill again within a step."""
        return {"rates": self._calibration.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes `state_dict`'s; an earlier version's counts are ignored. Raises ValueError for another shape."""
        if "counts" in state["rates"]:
            self._calibration.load_state_dict(state["rates"])

    # Tries

    def _question(self, request: Request) -> _Question:
        """The question's trie, made from its prompt and earlier responses for its first request."""
        name = request.dataset_id or request.prompt_id
        question = self._questions.get(name)
        if question is not None:
            return question
        trie = self._handle(self._lib.tlt_suffix_trie(self._pool))
        prompt, common = self._sequence(trie, _NONE), self._sequence(self._common, _NONE)
        self._append(trie, prompt, request.prompt)
        self._append(self._common, common, request.prompt[-self._tail :])
        past = self._history.of(request.dataset_id) if self._history is not None else []
        for response, weight in zip(past, _weights(past), strict=True):
            self._append(trie, self._sequence(trie, prompt, weight), response.token_ids)
        self._questions[name] = (trie, prompt, common)
        return trie, prompt, common

    def _sequence(self, trie: int, after: int, weight: int = 1) -> int:
        if trie == _NONE:
            return _NONE
        return self._handle(self._lib.tlt_suffix_sequence(self._pool, trie, after, weight))

    def _append(self, trie: int, sequence: int, tokens: np.ndarray) -> None:
        if sequence != _NONE and len(tokens):
            tokens = np.ascontiguousarray(tokens, np.int32)
            code = self._lib.tlt_suffix_append(self._pool, trie, sequence, tokens.ctypes.data, len(tokens))
            self._handle(code)

    @staticmethod
    def _handle(code: int) -> int:
        """A handle from C; -1 where the memory is used up, which only costs drafts. Raises BackendError otherwise."""
        return _NONE if code == NO_MEMORY else check(code)

    # Memory shared with C

    def _make_ask(self) -> Ask:
        """The arguments of `tlt_suffix_propose`: addresses of arrays that live as long as the drafter."""
        rows, ask = self._rows, Ask()
        fixed: dict[str, np.ndarray] = {
            "slots": rows.slots,
            "handles": self._handles,
            "keys": rows.keys,
            "positions": rows.output_len,
            "temperature": rows.temperature,
            "lengths": self._lengths,
            "rates": self._calibration.rates,
            "counts": self._counts,
        }
        for name, array in fixed.items():
            assert array.flags.c_contiguous
            setattr(ask, name, array.ctypes.data)
        return ask

    def _make_room(self, tokens: int) -> None:
        self._tokens, self._feature = np.empty((2, 2 * tokens), np.int32)
        self._cumulative_acceptance = np.empty(2 * tokens, np.float32)
        for name in ("tokens", "feature", "cumulative_acceptance"):
            setattr(self._ask, name, getattr(self, f"_{name}").ctypes.data)


def _weights(past: Sequence[PastResponse]) -> list[int]:
    """How often each earlier response counts: 1 for the worst score to 3 for the best, 2 if all are alike."""
    scores = np.nan_to_num([a.score for a in past], nan=-np.inf)
    if not len(past) or not np.isfinite(scores).all() or np.ptp(scores) == 0:
        return [2] * len(past)
    weights: list[int] = (1 + np.rint(2 * (scores - scores.min()) / np.ptp(scores))).astype(int).tolist()
    return weights


def _prior() -> np.ndarray:
    """Match rates by kind of token before anything was seen: a logistic fit to replays of the demo policy's responses.

    By the log odds of the token's share in the interpolated distribution, by the longest context and by the number of
    candidates (`csrc/suffix_draft.c`).
    """
    odds = 0.6 * (np.arange(ODDS) - 1.5)
    context = np.array([-1.4, 0.0, 0.4, 0.4, 0.5])  # contexts of 1-2, 3-4, 5-7, 8-11, 12 or more tokens
    candidates = np.array([0.0, -0.8, -1.2, -1.3, -1.4])  # 1, 2, 3-4, 5-8, 9 or more
    assert len(context) == len(candidates) == STEPS
    logit = odds[:, None, None] + context[:, None] + candidates
    prior: np.ndarray = (1 / (1 + np.exp(-logit))).ravel()
    return prior
