"""Drafts from responses that an earlier policy drew with the same sampling keys: pre-rollouts.

Both policies draw with the same noise, so a response parts from the earlier one only where an update has moved the
logits by more than the gap between two candidates.

    earlier response   a b c d e f g h ..
                             ^ place: the token that is expected next
    response so far    a b c              age 3: matched tokens in a row before the place

The place moves on with the response. Behind a mismatch it stays beside the response and is used again once a token
matches there; or it moves to the nearest position behind the same last two to four tokens. Match rates count every
emitted token that had a place, drafted or not: by the age there, and apart for responses that have had a mismatch.

Legend: B running rows, S slots, W output width, N drafted tokens, n new tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_tlt.models.draft import Draft
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.spec.match_rates import MatchRates
from megatron_tlt.types import DraftStrategy

if TYPE_CHECKING:
    from megatron_tlt.rollout.request import Request
    from megatron_tlt.rollout.spec.selector import StrategySelector

LONGEST = 31  # tokens of a draft: with the last drawn one, 32 rows of a request
_TAIL = 4  # last tokens that a new place is looked up by
_REACH = 64  # positions on both sides of the old place
_GIVE_UP = 128  # tokens without a good place after which the earlier response is dropped
_NEVER = np.iinfo(np.int32).max
_LOOK_EVERY = 8  # plain steps, in which places are only needed to know whether there are any
_LEAST_RATE = 0.3  # of a place that is of use
_AGES = np.array([2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128])  # at which a cell of the match rates ends


class PreRollouts:
    """The earlier responses of one call's requests, and the places in them. Equal calls give equal drafts."""

    def __init__(self, rows: RunningRows, selector: StrategySelector, most_rows: int):
        """`selector` chooses how the steps draft in which any row has a place; they feed at most `most_rows` rows."""
        self.selector, self.most_rows = selector, most_rows
        self._rows, self._vocab = rows, len(rows.is_stop)
        self._earlier: Mapping[tuple[int, int], np.ndarray] = {}
        slots = len(rows.outputs)
        self._tokens = np.zeros_like(rows.outputs)  # [S, W] by slot; rows that are never used take no memory
        self._length = np.zeros(slots, np.int32)  # [S] of `_tokens`
        self._due = np.full(slots, _NEVER, np.int32)  # [S] output tokens from which on they are compared; none: never
        self._read = np.zeros(slots, np.int32)  # [S] output tokens that were compared
        self._place = np.zeros(slots, np.int32)  # [S] in `_tokens`
        self._age = np.zeros(slots, np.int32)  # [S]; 0: no place
        self._missing = np.zeros(slots, np.int32)  # [S] output tokens since there was a good place
        self._parted = np.zeros(slots, np.bool_)  # [S] whether there was a mismatch
        self._plain_steps = 0  # in a row
        self._rates = MatchRates(_prior(), strength=12.0, memory=65536.0)

    @property
    def is_empty(self) -> bool:
        """Whether the call has no earlier response."""
        return not self._earlier

    def begin(self, earlier: Mapping[tuple[int, int], np.ndarray]) -> None:
        """The call's `GenerateCall.drafts`, before its first step. Mutates."""
        self._earlier = earlier

    def end_generate(self) -> None:
        """Forgets them. Mutates."""
        self._earlier = {}
        self._due[:] = _NEVER
        self._age[:] = 0

    def start(self, request: Request) -> None:
        """`request` now has a row and a slot. Its earlier response ends before a token of another vocabulary. Mutates.
        """
        slot, tokens = request.slot, self._earlier.get((request.prompt_id, request.sample_index))
        self._due[slot], self._age[slot] = _NEVER, 0
        if tokens is None:
            return
        foreign = (tokens < 0) | (tokens >= self._vocab)
        length = int(foreign.argmax()) if foreign.any() else len(tokens)
        length = min(length, self._tokens.shape[1])
        self._tokens[slot, :length] = tokens[:length]
        self._length[slot] = length
        for state in (self._read, self._place, self._missing, self._parted, self._due):
            state[slot] = 0

    def lengths(self, strategy: DraftStrategy) -> np.ndarray:
        """Int32 [B]: how many tokens each row may draft from its earlier response in a step of this strategy, by its
        lengths or, of plain steps, 1; 0 where the place is missing or too uncertain. Mutates the places.
        """
        self._plain_steps = 0 if strategy.draft_len else self._plain_steps + 1
        if self._plain_steps % _LOOK_EVERY == 0:
            self.follow()
        slots = self._rows.slots[: self._rows.num_rows]
        age = self._age[slots]
        if not age.any():
            return np.zeros_like(age)
        left: np.ndarray = self._length[slots] - self._place[slots]
        is_likely = self._rates.rates[_cells(age, self._parted[slots])] >= max(
            strategy.min_cumulative_acceptance, _LEAST_RATE
        )
        return np.where((age > 0) & (left > 0) & is_likely, np.minimum(left, max(1, strategy.draft_len)), 0)

    def follow(self) -> None:
        """Compares the tokens that rows have emitted since the last call, and moves their places. Mutates."""
        rows = self._rows
        slots, ends = rows.slots[: rows.num_rows], rows.output_len[: rows.num_rows]
        at = np.flatnonzero(ends >= self._due[slots])
        if not at.size:
            return
        slots, ends = slots[at], ends[at]
        new = ends - self._read[slots]
        row_of, within = _flat(new)
        of = slots[row_of]
        place = self._place[of] + within
        expected = self._tokens[of, np.minimum(place, self._tokens.shape[1] - 1)]
        same = (place < self._length[of]) & (expected == rows.outputs[of, self._read[of] + within])
        self._count(of, row_of, within, same, place < self._length[of])
        last_missed = np.full(len(slots), -1)
        np.maximum.at(last_missed, row_of[~same], within[~same])
        self._parted[slots] |= last_missed >= 0
        self._age[slots] = np.where(last_missed < 0, self._age[slots], -1 - last_missed) + new
        self._place[slots] += new
        self._read[slots] = ends
        lost = self._parted[slots] & (self._age[slots] < _TAIL)
        if lost.any():
            self._search(slots[lost], ends[lost])
        is_good = self._rates.rates[_cells(self._age[slots], self._parted[slots])] >= _LEAST_RATE
        is_good &= self._age[slots] > 0
        self._missing[slots] = missing = np.where(is_good, 0, self._missing[slots] + new)
        # The longer a response has gone its own way, the rarer it is compared.
        due = np.where(is_good, 0, ends + np.maximum(1, missing // 4))
        self._due[slots] = np.where(missing > _GIVE_UP, _NEVER, due)
        self._age[slots[missing > _GIVE_UP]] = 0

    def _count(
        self, of: np.ndarray, row_of: np.ndarray, within: np.ndarray, same: np.ndarray, is_expected: np.ndarray
    ) -> None:
        """Counts each row's tokens that had a place, up to its first mismatch. All [n]. Mutates the match rates."""
        first_missed = np.full(row_of[-1] + 1 if len(row_of) else 0, len(within))
        np.minimum.at(first_missed, row_of[~same], within[~same])
        counted = is_expected & (self._age[of] > 0) & (within <= first_missed[row_of])
        if counted.any():
            of = of[counted]
            self._rates.observe(_cells(self._age[of] + within[counted], self._parted[of]), same[counted])

    def _search(self, slots: np.ndarray, ends: np.ndarray) -> None:
        """Moves each place to the nearest one behind as many of the last tokens as possible, if these are two at least
        and more than match now. `ends`: output tokens. Mutates.
        """
        columns = np.arange(-_REACH - _TAIL, _REACH)
        before = self._place[slots, None] + columns  # positions of tokens that may stand before a new place
        length = self._length[slots, None]
        known = self._tokens[slots[:, None], np.clip(before, 0, self._tokens.shape[1] - 1)]
        known = np.where((before >= 0) & (before < length - 1), known, -1)  # a token must be left to draft
        matched, run = np.zeros((len(slots), 2 * _REACH), np.int32), True
        for back in range(_TAIL):
            drawn = self._rows.outputs[slots, np.maximum(ends - 1 - back, 0)]
            drawn = np.where(ends > back, drawn, -2)
            run = run & (known[:, _TAIL - 1 - back :][:, : 2 * _REACH] == drawn[:, None])
            matched += run
        offset = np.arange(-_REACH, _REACH)  # of a new place from the old one
        best = (matched * (2 * _REACH) - np.abs(offset)).argmax(1)
        age = matched[np.arange(len(slots)), best]
        found = (age > 1) & (age > self._age[slots])
        self._place[slots[found]] += offset[best[found]].astype(np.int32)
        self._age[slots[found]] = age[found]

    def propose(self, lengths: np.ndarray) -> Draft:
        """The next `lengths` int32 [B] tokens of each row's earlier response, which has as many."""
        row_of, within = _flat(lengths)
        of = self._rows.slots[row_of]
        cells = _cells(self._age[of] + within, self._parted[of])
        log_rates = np.log(self._rates.rates[cells], dtype=np.float64)
        summed = np.cumsum(log_rates)
        before = summed - log_rates
        first = np.cumsum(lengths) - lengths
        acceptance = np.exp(summed - before[first[row_of]]).astype(np.float32)
        return Draft(lengths, self._tokens[of, self._place[of] + within], acceptance)

    def state_dict(self) -> dict[str, Any]:
        """State of selector and match rates."""
        return {"selector": self.selector.state_dict(), "rates": self._rates.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        self.selector.load_state_dict(state["selector"])
        self._rates.load_state_dict(state["rates"])


def _flat(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The row and the place in the row, int64 [sum] each, of `counts` [B] elements of each row."""
    row_of = np.arange(len(counts)).repeat(counts)
    return row_of, np.arange(len(row_of)) - (np.cumsum(counts) - counts)[row_of]


def _cells(age: np.ndarray, parted: np.ndarray) -> np.ndarray:
    """Cells of the match rates, int32."""
    cells: np.ndarray = np.searchsorted(_AGES, age, side="right") + parted * (len(_AGES) + 1)
    return cells.astype(np.int32)


def _prior() -> np.ndarray:
    """Match rates before anything was seen: one that has not parted seldom does, one that has is caught up slowly."""
    ages = np.array([1, *_AGES])
    return np.concatenate((np.full(len(ages), 0.95), 0.95 - 0.5 * np.exp(-ages / 8)))
