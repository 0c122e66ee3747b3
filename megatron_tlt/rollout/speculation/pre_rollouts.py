"""Drafts from responses that an earlier policy drew with the same sampling keys: pre-rollouts.

Both policies draw with the same noise, so a response parts from the pre-rolled one only where an update has moved the
logits by more than the gap between two candidates.

    pre-rolled         a b c d e f g h ..
                             ^ place: the token that is expected next
    response so far    a b c              age 3: matched tokens in a row before the place

The place moves on with the response. Behind a mismatch it stays beside the response and is used again once a token
matches there; or it moves to the nearest position behind the same last two to four tokens. Match rates count every
emitted token that had a place, drafted or not: by the age there, and apart for responses that have had a mismatch.

These drafts cost rows only. A step verifies those tokens, the most likely first, that make its tokens a second most
(DSpark, Algorithm 1). The other rows, B - m(N) of them, decode as the drafter's selector chose:

    argmax over N of (p_1 + .. + p_N + m(N) + (B - m(N)) t) / seconds(N + m(N) + (B - m(N)) r)

p are the cumulative acceptances, descending, t the tokens and r the rows of a request in a step of the selector's; the
seconds are those of all steps that were recorded (`step_costs.RowCosts`), and of drafting.

Legend: B running rows, S slots, W output width, N drafted tokens, m rows that they belong to, n new tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.models.decoders.draft import Draft
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.speculation.cost_model_selector import EXPLORATION
from megatron_tlt.rollout.speculation.match_rates import MatchRates
from megatron_tlt.rollout.speculation.step_costs import Expected, RowCosts
from megatron_tlt.types import NO_DRAFT, DraftStrategy

if TYPE_CHECKING:
    from megatron_tlt.rollout.request import Request
    from megatron_tlt.rollout.speculation.selector import StrategySelector

LONGEST = 31  # tokens of a draft: with the last drawn one, 32 rows of a request
PRE_ROLLED = DraftStrategy("pre_rollout", LONGEST)  # of steps that verify such drafts, by name
_TAIL = 4  # last tokens that a new place is looked up by
_REACH = 64  # positions on both sides of the old place
_GIVE_UP = 128  # tokens without a good place after which the pre-rolled response is dropped
_NEVER = np.iinfo(np.int32).max
_LOOK_EVERY = 8  # steps behind one without drafts from here: what is faster seldom changes within a few
_LEAST_RATE = 0.3  # of a place that is of use
_LEAST_GAIN = 1.03  # in tokens a second over a step without them: less is within the error of the costs
_GROWTH = 2  # rows of a step, over the most that were measured: the costs of many more are not known
_OWN_SHARE = 0.05  # of one draft in the mean of its seconds
_AGES = np.array([2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128])  # at which a cell of the match rates ends


class Choice(NamedTuple):
    """How a step drafts."""

    strategy: DraftStrategy  # of the rows without a token of `pre_rolled`
    pre_rolled: Draft | None = None  # None: the selector measures the step

    def longest(self, most_rows: int, running: int) -> int:
        """Tokens that each other row may draft, in a step of `running` requests and at most `most_rows` rows."""
        pre_rolled, others = self.pre_rolled, running
        if pre_rolled is not None:
            most_rows -= pre_rolled.num_tokens
            others -= int(np.count_nonzero(pre_rolled.counts))
        return min(self.strategy.draft_len, max(0, most_rows - running) // max(1, others))


def choose(selector: StrategySelector, drafter: PreRolledDrafter | None, running: int) -> Choice:
    """How a step of `running` requests drafts: from pre-rollouts where that pays, in its other rows as the selector's
    usual step; else as it selects. Mutates both.
    """
    if drafter is not None and not drafter.is_empty:
        draft = drafter.propose(partial(selector.expected, running))
        if draft.num_tokens:  # where no row is left, an engine that drafts for whole batches need not draft
            return Choice(NO_DRAFT if draft.counts.all() else selector.usual(running), draft)
    return Choice(selector.select(running))


class PreRolledDrafter:
    """The pre-rolled responses to one call's requests, and the places in them."""

    def __init__(self, rows: RunningRows, most_rows: int, costs: RowCosts | None, longest: int = LONGEST):
        """Steps feed at most `most_rows` rows, and draft `longest` tokens of a response. Without `costs` every step
        verifies as many tokens as it may.
        """
        self.most_rows = most_rows
        self._costs, self._longest = costs, longest
        self._own_seconds = 0.0  # of making a draft, a fading mean
        self._plain_seconds = 0.0  # of steps since the last draft from here
        self._rows, self._vocab = rows, len(rows.is_stop)
        self._pre_rolled: Mapping[tuple[int, int], np.ndarray] = {}
        slots = len(rows.outputs)
        self._tokens = np.zeros(rows.outputs.shape, np.int32)  # [S, W] by slot; rows that are never used take no memory
        self._length = np.zeros(slots, np.int32)  # [S] of `_tokens`
        self._compare_from = np.full(slots, _NEVER, np.int32)  # [S] output tokens from which on they are compared
        self._read = np.zeros(slots, np.int32)  # [S] output tokens that were compared
        self._place = np.zeros(slots, np.int32)  # [S] in `_tokens`
        self._age = np.zeros(slots, np.int32)  # [S]; 0: no place
        self._since_good = np.zeros(slots, np.int32)  # [S] output tokens since there was a good place
        self._has_parted = np.zeros(slots, np.bool_)  # [S] whether there was a mismatch
        self._rest = 0  # steps that stay plain before drafts are weighed again
        self._rates = MatchRates(_prior(), strength=12.0, memory=65536.0)

    @classmethod
    def of(
        cls,
        section: SpeculationSection,
        rows: RunningRows,
        budget: int,
        verify_rows: int,
        max_requests: int,
        longest: int = LONGEST,
    ) -> Self:
        """Of an engine whose steps feed `budget` rows at most, and `verify_rows` if they verify such drafts, unless its
        drafter's have more.
        """
        most_rows = min(budget, max(verify_rows, max_requests * section.rows_each))
        return cls(rows, most_rows, RowCosts() if section.selector == "cost_model" else None, longest)

    @property
    def is_empty(self) -> bool:
        """Whether the call has no pre-rolled response."""
        return not self._pre_rolled

    def begin(self, pre_rolled: Mapping[tuple[int, int], np.ndarray]) -> None:
        """The call's `GenerateCall.drafts`, before its first step. Mutates."""
        self._pre_rolled, self._rest = pre_rolled, 0

    def end_generate(self) -> None:
        """Forgets them. Mutates."""
        self._pre_rolled = {}
        self._compare_from[:] = _NEVER
        self._age[:] = 0

    def start(self, request: Request) -> None:
        """`request` now has a row and a slot. Its pre-rolled response ends before a token of another vocabulary. One
        that has ended before the present turn, such as a pre-rolled first turn, is not used. Mutates.
        """
        slot, tokens = request.slot, self._pre_rolled.get((request.prompt_id, request.sample_index))
        self._compare_from[slot], self._age[slot] = _NEVER, 0
        if tokens is None or len(tokens) <= request.turn_start:
            return
        foreign = (tokens < 0) | (tokens >= self._vocab)
        length = int(foreign.argmax()) if foreign.any() else len(tokens)
        length = min(length, self._tokens.shape[1])
        self._tokens[slot, :length] = tokens[:length]
        self._length[slot] = length
        for state in (self._read, self._place, self._since_good, self._has_parted, self._compare_from):
            state[slot] = 0
        self._rest = 0

    def propose(self, usual: Callable[[], Expected]) -> Draft:
        """The tokens of pre-rolled responses that the next step verifies; none where the step that the selector chose,
        which is expected to bring `usual()`, is faster. Most steps need not ask. Mutates.
        """
        self._rest -= 1
        if self._rest >= 0:
            return Draft.empty(self._rows.num_rows)
        self.follow()
        lengths = self._lengths()
        if not lengths.any():
            return Draft.empty(self._rows.num_rows)
        draft = self._draft(lengths)
        draft = draft.select(self._chosen(draft, usual))
        self._rest = 0 if draft.num_tokens else _LOOK_EVERY
        return draft

    def _lengths(self) -> np.ndarray:
        """Int32 [B]: how many tokens each row could draft; 0 where the place is missing or of little use."""
        rows, running = self._rows, self._rows.num_rows
        slots = rows.slots[:running]
        age = self._age[slots]
        is_good = (age > 0) & (self._rates.rates[_cells(age, self._has_parted[slots])] >= _LEAST_RATE)
        most = rows.limit[:running] - rows.output_len[:running] - 1  # a response's last token is never drafted
        left = np.minimum(self._length[slots] - self._place[slots], most)
        lengths: np.ndarray = np.where(is_good, np.clip(left, 0, self._longest), 0)
        return lengths

    def _chosen(self, draft: Draft, usual: Callable[[], Expected]) -> np.ndarray:
        """Which of the draft's tokens [N] are verified, bool [N]."""
        acceptance = draft.cumulative_acceptance.astype(np.float64)
        order = (-acceptance).argsort(kind="stable")[: max(0, self.most_rows - self._rows.num_rows)]
        best = len(order)
        if self._costs is not None:
            best = self._best(self._costs, acceptance[order], draft.positions[order] == 0, usual())
        chosen = np.zeros(len(acceptance), np.bool_)
        chosen[order[:best]] = True
        return chosen

    def _best(self, costs: RowCosts, acceptance: np.ndarray, is_first: np.ndarray, usual: Expected) -> int:
        """How many of the first tokens of these descending cumulative acceptances [N] give most tokens a second; where
        that is none, at times the best other number. `is_first` bool [N]: the first one of its row.
        """
        running = self._rows.num_rows
        most = max(0, _GROWTH * costs.most_rows - running)
        others = running - np.append(0, is_first[:most].cumsum())  # rows that decode as usual
        tokens = running + np.append(0.0, acceptance[:most].cumsum()) + others * (usual.tokens - 1)
        seconds = costs.seconds(running, np.arange(len(tokens)) + others * (usual.rows - 1))
        seconds += usual.draft_seconds * (others > 0)
        seconds[1:] += self._own_seconds
        speed = tokens / seconds
        speed[0] *= _LEAST_GAIN
        best = int(speed.argmax())
        if best or len(speed) == 1:
            return best
        trial = 1 + int(speed[1:].argmax())
        lost = seconds[trial] - tokens[trial] / speed[0]
        return trial if lost <= EXPLORATION * self._plain_seconds else 0

    def record(self, running: int, rows: int, step_seconds: float, own_seconds: float | None) -> None:
        """A decoding step took so long; `own_seconds` went into its draft from here, if it had one. Mutates."""
        if self._costs is not None:
            self._costs.record(running, rows, step_seconds)
        if own_seconds is None:
            self._plain_seconds += step_seconds
            return
        self._plain_seconds = 0.0
        self._own_seconds += _OWN_SHARE * (own_seconds - self._own_seconds)

    def follow(self) -> None:
        """Compares the tokens that rows have emitted since the last call, and moves their places. Mutates."""
        rows = self._rows
        slots, ends = rows.slots[: rows.num_rows], rows.output_len[: rows.num_rows]
        at = np.flatnonzero(ends >= self._compare_from[slots])
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
        self._has_parted[slots] |= last_missed >= 0
        self._age[slots] = np.where(last_missed < 0, self._age[slots], -1 - last_missed) + new
        self._place[slots] += new
        self._read[slots] = ends
        lost = self._has_parted[slots] & (self._age[slots] < _TAIL)
        if lost.any():
            self._search(slots[lost], ends[lost])
        is_good = self._rates.rates[_cells(self._age[slots], self._has_parted[slots])] >= _LEAST_RATE
        is_good &= self._age[slots] > 0
        self._since_good[slots] = missing = np.where(is_good, 0, self._since_good[slots] + new)
        # The longer a response has gone its own way, the rarer it is compared.
        due = np.where(is_good, 0, ends + np.maximum(1, missing // 4))
        self._compare_from[slots] = np.where(missing > _GIVE_UP, _NEVER, due)
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
            self._rates.observe(_cells(self._age[of] + within[counted], self._has_parted[of]), same[counted])

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

    def _draft(self, lengths: np.ndarray) -> Draft:
        """The next `lengths` int32 [B] tokens of each row's pre-rolled response, which has as many."""
        row_of, within = _flat(lengths)
        of = self._rows.slots[row_of]
        cells = _cells(self._age[of] + within, self._has_parted[of])
        log_rates = np.log(self._rates.rates[cells], dtype=np.float64)
        summed = np.cumsum(log_rates)
        before = summed - log_rates
        first = np.cumsum(lengths) - lengths
        acceptance = np.exp(summed - before[first[row_of]]).astype(np.float32)
        return Draft(lengths, self._tokens[of, self._place[of] + within], acceptance)


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
