"""Suffix and eagle together: each request takes the proposal from which it may expect more.

The suffix draft costs next to nothing, so it is made first, for every row. The eagle drafter is then asked only for
the rows where it is likely to do better, judged by what its own drafts of that request promised lately, and only if
what they promise more than the suffix draft is worth the time of an eagle call, which is measured.

A draft's promise is in tokens: the sum of its nodes' survivals, each less what its row costs.
Legend: B rows, A rows asked for, N nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_tlt.rollout.request import Request
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.spec.draft import Draft
from megatron_tlt.rollout.spec.eagle import EagleDrafter
from megatron_tlt.rollout.spec.suffix import SuffixDrafter
from megatron_tlt.types import DraftStrategy

SUFFIX, EAGLE = 0, 1
_MEMORY = 0.8  # of a request's running mean
_DRAFT_SHARE = 0.25  # what drafting adds to a step, as long as nobody says what time is worth
_EXPLORE = 128  # proposals after which the eagle drafter is asked whatever it promised
_TRUST = 1 / 8  # of a new measurement of an eagle call
_MARGINAL = 0.5  # a further token's time, in mean times a token: a call costs something however short it is


class CallSeconds:
    """Seconds of an eagle call by the rows that it is for; doubling buckets. Unmoved by single slow calls."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, float, float]] = {}  # bucket -> calls, seconds a row, longest draft

    def observe(self, asked: int, longest: int, seconds: float) -> None:
        """A call for `asked` >= 1 rows drafted at most `longest` tokens for each. Mutates the estimate."""
        key, row = asked.bit_length(), seconds / asked
        calls, usual, length = self._known.get(key, (0, row, float(longest)))
        if calls < 4:
            usual = min(usual, row)  # the first calls catch up with much
        else:
            usual += _TRUST * (min(row, 1.5 * usual) - usual)
        self._known[key] = calls + 1, usual, length + _TRUST * (longest - length)

    def of(self, asked: int) -> tuple[float, float]:
        """(a call for `asked` >= 1 rows, each further token of a row) in seconds; zeros if nothing is known."""
        if not self._known:
            return 0.0, 0.0
        key = asked.bit_length()
        if key not in self._known:
            key = min(self._known, key=lambda known: abs(known - key))
        _, row, longest = self._known[key]
        return row * asked, _MARGINAL * row / max(1.0, longest)


class HybridDrafter:
    """See `rollout.spec.base.Drafter`. `EAGLE` and `SUFFIX` rows are marked in `Draft.source`."""

    kind = "hybrid"

    def __init__(
        self,
        suffix: SuffixDrafter,
        eagle: EagleDrafter,
        slots: int,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """For requests in `slots` slots; `clock` times eagle calls."""
        self._clock = clock
        self.suffix, self.eagle = suffix, eagle
        self.rate = 0.0  # tokens per second that this engine achieves at present; 0 if unknown
        self._calls = CallSeconds()
        self._promise = np.full(slots, 4.0, np.float32)  # of an eagle draft, by slot
        self._usual = 4.0
        self._unasked = 0  # proposals since the last eagle call

    def start(self, request: Request) -> None:
        """See `Drafter.start`."""
        self._promise[request.slot] = self._usual
        self.suffix.start(request)
        self.eagle.start(request)

    def follow(self, rows: RunningRows) -> None:
        """See `Drafter.follow`."""
        self.suffix.follow(rows)

    def stop(self, request: Request) -> None:
        """See `Drafter.stop`."""
        self.suffix.stop(request)
        self.eagle.stop(request)

    def end_generate(self) -> None:
        """See `Drafter.end_generate`."""
        self.suffix.end_generate()
        self.eagle.end_generate()

    def state_dict(self) -> dict[str, Any]:
        """Both parts' calibration."""
        return {"suffix": self.suffix.state_dict(), "eagle": self.eagle.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes `state_dict`'s."""
        self.suffix.load_state_dict(state["suffix"])
        self.eagle.load_state_dict(state["eagle"])

    def propose(self, rows: RunningRows, lengths: np.ndarray, strategy: DraftStrategy) -> Draft:
        """See `Drafter.propose`."""
        first = self.suffix.propose(rows, lengths, strategy)
        count = rows.num_rows
        row_of = np.repeat(np.arange(count), first.counts)
        price = strategy.min_survival if self.rate else 0.0
        expected = _promised(first, row_of, price, count)
        ask = self._ask(rows.slots[:count], lengths, expected)
        if ask is None:
            first.source = np.zeros(count, np.int8)
            return first
        second = self._eagle_draft(rows, lengths, ask, strategy)
        row_of_second = np.repeat(np.arange(count), second.counts)
        promised = _promised(second, row_of_second, price, count)
        asked = rows.slots[:count][ask]
        self._promise[asked] = _MEMORY * self._promise[asked] + (1 - _MEMORY) * promised[ask]
        self._usual = 0.99 * self._usual + 0.01 * float(promised[ask].mean())
        # It may have promised less than was hoped: then the suffix draft is still there.
        use = ask & (promised > expected)
        return _merge(first, second, row_of, row_of_second, use)

    def _ask(self, slots: np.ndarray, lengths: np.ndarray, expected: np.ndarray) -> np.ndarray | None:
        """Bool [B], the rows to ask the eagle drafter for, or None. `expected` [B] is the suffix drafts' promise."""
        self._unasked += 1
        explore = self._unasked > _EXPLORE
        more = self._promise[slots] - expected
        if explore:
            ask = lengths > 0
        elif not self.rate:
            ask = (more > _DRAFT_SHARE * (1 + expected)) & (lengths > 0)
        else:
            ask = (more > 0) & (lengths > 0)
            asked = int(np.count_nonzero(ask))
            if asked:  # rows that do not pay for themselves only make the call longer
                ask &= more > self.rate * self._calls.of(asked)[0] / asked
        asked = int(np.count_nonzero(ask))
        if not asked:
            return None
        if self.rate and not explore and more[ask].sum() < self.rate * self._calls.of(asked)[0]:
            return None
        self._unasked = 0
        return ask

    def _eagle_draft(
        self, rows: RunningRows, lengths: np.ndarray, ask: np.ndarray, strategy: DraftStrategy
    ) -> Draft:
        """The eagle drafter's proposal for the rows in `ask`, timed. Tokens of it must be worth its own time, too."""
        asked = int(np.count_nonzero(ask))
        if self.rate:
            least = min(0.95, strategy.min_survival + self.rate * self._calls.of(asked)[1])
            strategy = replace(strategy, min_survival=least)
        started = self._clock()
        draft = self.eagle.propose(rows, np.where(ask, lengths, 0).astype(np.int32), strategy)
        seconds = self._clock() - started
        self._calls.observe(asked, int(draft.counts.max()) // strategy.topk, seconds)
        return draft

    def observe(self, draft: Draft, reached: np.ndarray, accepted: np.ndarray) -> None:
        """See `Drafter.observe`: each part learns from its own rows."""
        assert draft.source is not None
        from_eagle = np.repeat(draft.source == EAGLE, draft.counts)
        if not from_eagle.any():
            self.suffix.observe(draft, reached, accepted)
        elif from_eagle.all():
            self.eagle.observe(draft, reached, accepted)
        else:
            self.eagle.observe(draft, reached & from_eagle, accepted & from_eagle)
            self.suffix.observe(draft, reached & ~from_eagle, accepted & ~from_eagle)


def _promised(draft: Draft, row_of: np.ndarray, price: float, count: int) -> np.ndarray:
    """Float64 [B]: what each row's nodes promise beyond `price`."""
    if count == 1:
        return np.array([sum(s - price for s in draft.survival.tolist() if s > price)])
    return np.bincount(row_of, np.maximum(draft.survival - price, 0.0), minlength=count)


def _merge(
    suffix: Draft, eagle: Draft, suffix_rows: np.ndarray, eagle_rows: np.ndarray, use_eagle: np.ndarray
) -> Draft:
    """Row by row one or the other."""
    source = np.where(use_eagle, EAGLE, SUFFIX).astype(np.int8)
    if use_eagle.all():
        eagle.source = source
        return eagle
    a, b = suffix.select(~use_eagle[suffix_rows]), eagle.select(use_eagle[eagle_rows])
    if not b.num_nodes:
        a.source = source
        return a
    order = np.argsort(
        np.concatenate((suffix_rows[~use_eagle[suffix_rows]], eagle_rows[use_eagle[eagle_rows]])),
        kind="stable",
    )
    assert a.feature is not None and b.feature is not None

    def join(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        joined: np.ndarray = np.concatenate((x, y))[order]
        return joined

    parents = None
    if a.parents is not None or b.parents is not None:
        parents = join(_parents(a), _parents(b))
    return Draft(
        a.counts + b.counts,
        join(a.tokens, b.tokens),
        join(a.survival, b.survival),
        join(a.depths, b.depths),
        parents,
        join(a.feature, b.feature),
        None,
        source,
    )


def _parents(draft: Draft) -> np.ndarray:
    """Parents of a draft that may be all chains: each node follows the one before it."""
    if draft.parents is not None:
        return draft.parents
    return draft.depths - 2
