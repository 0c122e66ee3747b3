"""Suffix and eagle together: each request takes the proposal from which it may expect more.

The suffix draft costs next to nothing, so it is made first, for every row. The eagle drafter is then asked only for
the rows where it is likely to do clearly better, judged by what its own drafts of that request promised lately.
Whether that pays in time is not judged here: a selector that measures it may ask for one part alone, by the
strategy's kind ("suffix" or "eagle").

A draft's promise is in tokens: the sum of its nodes' cumulative acceptances, each less what its row costs.
Legend: B rows, N nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
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
_DRAFT_SHARE = 0.25  # of a step's tokens that an eagle draft must promise more, to be worth its call
_EXPLORE = 128  # proposals after which the eagle drafter is asked whatever it promised


class HybridDrafter:
    """See `rollout.spec.base.Drafter`. `EAGLE` and `SUFFIX` rows are marked in `Draft.source`."""

    kind = "hybrid"

    def __init__(self, suffix: SuffixDrafter, eagle: EagleDrafter, slots: int):
        """For requests in `slots` slots."""
        self.suffix, self.eagle = suffix, eagle
        self._promise = np.full(slots, 4.0, np.float32)  # of an eagle draft, by slot
        self._usual = 4.0
        self._unasked = 0  # proposals since the last eagle call

    def start(self, request: Request) -> None:
        """See `Drafter.start`."""
        self._promise[request.slot] = self._usual
        self.suffix.start(request)
        self.eagle.start(request)

    def sync_context(self, rows: RunningRows, strategy: DraftStrategy) -> None:
        """See `Drafter.sync_context`. Nobody reads the tries while the eagle part drafts alone."""
        if strategy.kind != "eagle":
            self.suffix.sync_context(rows, strategy)

    def finish(self, request: Request) -> None:
        """See `Drafter.finish`."""
        self.suffix.finish(request)
        self.eagle.finish(request)

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
        """See `Drafter.propose`. A strategy of kind "suffix" or "eagle" asks that part for all rows."""
        count = rows.num_rows
        if strategy.kind == "eagle":
            draft = self.eagle.propose(rows, lengths, strategy)
            draft.source = np.full(count, EAGLE, np.int8)
            return draft
        first = self.suffix.propose(rows, lengths, strategy)
        if strategy.kind == "suffix":
            first.source = np.full(count, SUFFIX, np.int8)
            return first
        row_of = np.repeat(np.arange(count), first.counts)
        price = strategy.min_cumulative_acceptance
        expected = _promised(first, row_of, price, count)
        ask = self._ask(rows.slots[:count], lengths, expected)
        if not ask.any():
            first.source = np.full(count, SUFFIX, np.int8)
            return first
        second = self.eagle.propose(rows, np.where(ask, lengths, 0).astype(np.int32), strategy)
        row_of_second = np.repeat(np.arange(count), second.counts)
        promised = _promised(second, row_of_second, price, count)
        asked = rows.slots[:count][ask]
        self._promise[asked] = _MEMORY * self._promise[asked] + (1 - _MEMORY) * promised[ask]
        self._usual = 0.99 * self._usual + 0.01 * float(promised[ask].mean())
        # It may have promised less than was hoped: then the suffix draft is still there.
        use = ask & (promised > expected)
        return _merge(first, second, row_of, row_of_second, use)

    def _ask(self, slots: np.ndarray, lengths: np.ndarray, expected: np.ndarray) -> np.ndarray:
        """Bool [B], the rows to ask the eagle drafter for. `expected` [B] is what the suffix drafts promise."""
        self._unasked += 1
        ask: np.ndarray = lengths > 0
        if self._unasked <= _EXPLORE:
            ask &= self._promise[slots] - expected > _DRAFT_SHARE * (1 + expected)
        if ask.any():
            self._unasked = 0
        return ask

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
        return np.array([sum(s - price for s in draft.cumulative_acceptance.tolist() if s > price)])
    return np.bincount(row_of, np.maximum(draft.cumulative_acceptance - price, 0.0), minlength=count)


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
        join(a.cumulative_acceptance, b.cumulative_acceptance),
        join(a.depths, b.depths),
        parents,
        join(a.feature, b.feature),
        source,
    )


def _parents(draft: Draft) -> np.ndarray:
    """Parents of a draft that may be all chains: each node follows the one before it."""
    if draft.parents is not None:
        return draft.parents
    return draft.depths - 2
