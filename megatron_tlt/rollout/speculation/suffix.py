"""Drafts from how siblings and earlier responses continued: suffix tries in C (`models/decoders/native/csrc/suffix.h`).

Every prompt of a rollout has a trie over its prompt, the responses in progress (a request's own text too) and the
responses of earlier epochs. How it becomes a draft: `csrc/suffix_draft.c`.

Legend: S slots, N drafted tokens, W output width.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass

import numpy as np

from megatron_tlt.config.speculation import SuffixSection
from megatron_tlt.errors import BackendError, ConfigError
from megatron_tlt.models.decoders.draft import Draft
from megatron_tlt.models.decoders.native.abi import library, point_at_arrays
from megatron_tlt.models.decoders.native.build import find_compiler
from megatron_tlt.models.decoders.native.suffix_abi import (
    MAX_DEPTH,
    MAX_LENGTH,
    NO_MEMORY,
    ODDS,
    STEPS,
    SuffixRows,
    check,
)
from megatron_tlt.rollout.request import Request
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.speculation.history import ResponseHistory
from megatron_tlt.rollout.speculation.match_rates import MatchRates
from megatron_tlt.types import DraftStrategy

_NONE = -1
_DEPTH = 16  # tokens of the longest context that is matched
_Sequence = tuple[int, int]  # a trie, and a sequence in it


@dataclass(frozen=True)
class _Arrays:
    """The arrays that C reads and writes in place, in every call. None is ever replaced."""

    slots: np.ndarray  # int32 [S] by row
    handles: np.ndarray  # int32 [S, 2] by slot: a `_Sequence`
    outputs: np.ndarray  # int32 [S, W] by slot
    num_read: np.ndarray  # int32 [S] by slot: output tokens that are in the trie
    output_len: np.ndarray  # int32 [S] by row
    keys: np.ndarray  # uint64 [S] by row
    temperature: np.ndarray  # float32 [S] by row
    lengths: np.ndarray  # int32 [S] by row: longest draft
    rates: np.ndarray  # float32 [cells]
    counts: np.ndarray  # int32 [S] by row: drafted tokens
    tokens: np.ndarray  # int32 [N at most], row after row
    feature: np.ndarray  # int32 [N at most]
    cumulative_acceptance: np.ndarray  # float32 [N at most]

    @classmethod
    def of(cls, rows: RunningRows, rates: np.ndarray) -> _Arrays:
        """Those of `rows` and `rates`; allocates the others."""
        slots = len(rows.limit)
        most = slots * MAX_LENGTH
        return cls(
            slots=rows.slots,
            handles=np.full((slots, 2), _NONE, np.int32),
            outputs=rows.outputs,
            num_read=np.zeros(slots, np.int32),
            output_len=rows.output_len,
            keys=rows.keys,
            temperature=rows.temperature,
            lengths=np.zeros(slots, np.int32),
            rates=rates,
            counts=np.zeros(slots, np.int32),
            tokens=np.zeros(most, np.int32),
            feature=np.zeros(most, np.int32),
            cumulative_acceptance=np.zeros(most, np.float32),
        )


class SuffixDrafter:
    """A `rollout.speculation.base.Drafter` that needs no model. Equal calls give equal drafts."""

    kind = "suffix"

    def __init__(self, section: SuffixSection, rows: RunningRows, history: ResponseHistory | None = None):
        """Drafts for `rows`. Its tries take at most `section.history_mib` MiB; then nothing more is added.

        Raises ConfigError without a C compiler, BackendError if the library cannot be built.
        """
        if find_compiler() is None:
            allowed = "needs a C compiler: no cc, gcc or clang on PATH (install one, or choose another drafter)"
            raise ConfigError.of("rollout.speculation.drafter", self.kind, allowed)
        assert _DEPTH <= MAX_DEPTH
        self._lib, self._rows, self._history = library(), rows, history
        self._pool = self._lib.tlt_suffix_new(_DEPTH, len(rows.is_stop), section.history_mib << 20)
        if not self._pool:
            raise BackendError("suffix drafter: no memory left")
        weakref.finalize(self, self._lib.tlt_suffix_free, self._pool)
        self._prompts: dict[str | int, _Sequence] = {}
        self._sequences: dict[int, _Sequence] = {}  # by Request.order
        self._unread: dict[int, Request] = {}  # started since the last `sync_context`, by Request.order
        self._calibration = MatchRates(_prior(), strength=12.0, memory=65536.0)
        self._arrays = _Arrays.of(rows, self._calibration.rates)
        # Made once: to get an array's address from numpy takes longer than a draft.
        self._call = SuffixRows(width=rows.outputs.shape[1])
        point_at_arrays(self._call, self._arrays)
        self._call_at = ctypes.byref(self._call)

    def start(self, request: Request) -> None:
        """Notes the request. `sync_context` reads its tokens, and only in a rollout with drafts."""
        self._unread[request.order] = request

    def finish(self, request: Request) -> None:
        """Forgets the request. Its tokens stay in the trie, for its siblings."""
        if request.order in self._sequences and request.order not in self._unread:
            self._add(request)

    def sync_context(self, rows: RunningRows) -> None:
        """Raises BackendError for a token outside the vocabulary; then no row is read."""
        assert rows is self._rows
        for request in self._unread.values():
            self._add(request)
        self._unread.clear()
        self._call.rows = rows.num_rows
        check(self._lib.tlt_suffix_follow(self._pool, self._call_at))

    def _add(self, request: Request) -> None:
        """Adds a request's tokens to its prompt's trie, behind those that are in it already. Mutates."""
        known = self._sequences.get(request.order)
        if known is None:
            trie, prompt = self._prompt(request)
            self._sequences[request.order] = known = (trie, self._sequence(trie, prompt))
        output = np.asarray(request.output, np.int32)
        if _NONE not in known:
            self._append(*known, output[self._lib.tlt_suffix_length(self._pool, *known) :])
        if request.slot >= 0:
            self._arrays.handles[request.slot] = known
            self._arrays.num_read[request.slot] = len(output)

    def propose(self, rows: RunningRows, lengths: np.ndarray, strategy: DraftStrategy) -> Draft:
        assert rows is self._rows
        count, call, arrays = rows.num_rows, self._call, self._arrays
        arrays.lengths[:count] = lengths
        call.rows, call.min_cumulative_acceptance = count, strategy.min_cumulative_acceptance
        total = check(self._lib.tlt_suffix_propose(self._pool, self._call_at))
        drafted = (arrays.tokens, arrays.cumulative_acceptance, arrays.feature)
        return Draft(arrays.counts[:count].copy(), *(column[:total].copy() for column in drafted))

    def observe(self, draft: Draft, reached: np.ndarray, accepted: np.ndarray) -> None:
        if draft.num_tokens:
            assert draft.feature is not None
            self._calibration.observe(draft.feature[reached], accepted[reached])

    def end_generate(self) -> None:
        """Drops all tries."""
        self._lib.tlt_suffix_clear(self._pool)
        self._prompts.clear()
        self._sequences.clear()
        self._unread.clear()
        self._arrays.handles[:] = _NONE

    def _prompt(self, request: Request) -> _Sequence:
        """The prompt's sequence, in a trie of its own that is made for its first request, with earlier responses."""
        name = request.dataset_id or request.prompt_id
        known = self._prompts.get(name)
        if known is not None:
            return known
        trie = self._handle(self._lib.tlt_suffix_trie(self._pool))
        prompt = self._sequence(trie, _NONE)
        self._append(trie, prompt, request.prompt)
        for response in self._history.of(request.dataset_id) if self._history is not None else ():
            self._append(trie, self._sequence(trie, prompt), response.token_ids)
        self._prompts[name] = (trie, prompt)
        return trie, prompt

    def _sequence(self, trie: int, after: int) -> int:
        """A new sequence that goes on where sequence `after` ends (-1: from nothing); -1 without memory."""
        if trie == _NONE:
            return _NONE
        return self._handle(self._lib.tlt_suffix_sequence(self._pool, trie, after))

    def _append(self, trie: int, sequence: int, tokens: np.ndarray) -> None:
        if sequence != _NONE and len(tokens):
            tokens = np.ascontiguousarray(tokens, np.int32)
            code = self._lib.tlt_suffix_append(self._pool, trie, sequence, tokens.ctypes.data, len(tokens))
            self._handle(code)

    @staticmethod
    def _handle(code: int) -> int:
        """A handle from C; -1 where the memory is used up, which only costs drafts. Raises BackendError otherwise."""
        return _NONE if code == NO_MEMORY else check(code)


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
