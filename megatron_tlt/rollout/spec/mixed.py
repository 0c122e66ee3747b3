"""Suffix and trained drafter mixed: each request takes the draft of which more tokens are expected to be emitted.

The suffix draft costs next to nothing, so it is made first, for every row. The trained drafter drafts only for the rows
where it is likely to do clearly better, judged by the value of its own latest drafts of that request. Whether that pays
in time is not judged here: a selector that measures it may choose the trained part alone, by the strategy's kind.

A draft's value is in tokens: the sum of its tokens' cumulative acceptances, each less the strategy's minimum.
Legend: B rows, N drafted tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_tlt.models.draft import SUFFIX, TRAINED, Draft
from megatron_tlt.rollout.request import Request
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.spec.suffix import SuffixDrafter
from megatron_tlt.rollout.spec.trained import TrainedDrafter
from megatron_tlt.types import DraftStrategy

_MEMORY = 0.8  # weight of the past in a request's running mean value of trained drafts
_DRAFT_SHARE = 0.25  # of a step's tokens that a trained draft must gain, to be worth its call
_EXPLORE = 128  # proposals after which the trained drafter drafts whatever its value was


class MixedDrafter:
    """See `rollout.spec.base.Drafter`. `TRAINED` and `SUFFIX` rows are marked in `Draft.source`."""

    kind = "mixed"

    def __init__(self, suffix: SuffixDrafter, trained: TrainedDrafter, slots: int):
        """For requests in `slots` slots."""
        self.suffix, self.trained = suffix, trained
        self._value = np.full(slots, 4.0, np.float32)  # of a trained draft, by slot
        self._mean_value = 4.0  # of all requests: the start of a new one
        self._since_trained = 0  # proposals since the last trained draft

    def start(self, request: Request) -> None:
        """See `Drafter.start`."""
        self._value[request.slot] = self._mean_value
        self.suffix.start(request)
        self.trained.start(request)

    def sync_context(self, rows: RunningRows, strategy: DraftStrategy) -> None:
        """See `Drafter.sync_context`. The tries are not read while the trained part drafts alone."""
        if strategy.kind != "trained":
            self.suffix.sync_context(rows, strategy)

    def finish(self, request: Request) -> None:
        """See `Drafter.finish`."""
        self.suffix.finish(request)

    def end_generate(self) -> None:
        """See `Drafter.end_generate`."""
        self.suffix.end_generate()

    def state_dict(self) -> dict[str, Any]:
        """Both parts' calibration."""
        return {"suffix": self.suffix.state_dict(), "trained": self.trained.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes `state_dict`'s."""
        self.suffix.load_state_dict(state["suffix"])
        self.trained.load_state_dict(state["trained"])

    def propose(self, rows: RunningRows, lengths: np.ndarray, strategy: DraftStrategy) -> Draft:
        """See `Drafter.propose`. With a strategy of kind "trained" that part drafts for all rows."""
        count = rows.num_rows
        if strategy.kind == "trained":
            draft = self.trained.propose(rows, lengths, strategy)
            draft.source = np.full(count, TRAINED, np.int8)
            return draft
        suffix = self.suffix.propose(rows, lengths, strategy)
        least = strategy.min_cumulative_acceptance
        suffix_value = _value(suffix, least)
        wanted = self._rows_for_trained(rows.slots[:count], lengths, suffix_value)
        if not wanted.any():
            suffix.source = np.full(count, SUFFIX, np.int8)
            return suffix
        trained = self.trained.propose(rows, np.where(wanted, lengths, 0).astype(np.int32), strategy)
        value = _value(trained, least)
        slots = rows.slots[:count][wanted]
        self._value[slots] = _MEMORY * self._value[slots] + (1 - _MEMORY) * value[wanted]
        self._mean_value = 0.99 * self._mean_value + 0.01 * float(value[wanted].mean())
        draft = _merge(suffix, trained, wanted & (value > suffix_value))
        draft.passed_over = _value(suffix, 0.0)
        return draft

    def _rows_for_trained(self, slots: np.ndarray, lengths: np.ndarray, suffix_value: np.ndarray) -> np.ndarray:
        """Bool [B], the rows that the trained drafter drafts for. Mutates the count of proposals without it."""
        self._since_trained += 1
        wanted: np.ndarray = lengths > 0
        if self._since_trained <= _EXPLORE:
            wanted &= self._value[slots] - suffix_value > _DRAFT_SHARE * (1 + suffix_value)
        if wanted.any():
            self._since_trained = 0
        return wanted

    def observe(self, draft: Draft, reached: np.ndarray, accepted: np.ndarray) -> None:
        """See `Drafter.observe`: each part learns from its own rows."""
        assert draft.source is not None
        from_trained = np.repeat(draft.source == TRAINED, draft.counts)
        self.trained.observe(draft, reached & from_trained, accepted & from_trained)
        self.suffix.observe(draft, reached & ~from_trained, accepted & ~from_trained)


def _value(draft: Draft, least: float) -> np.ndarray:
    """Float64 [B]: the sum over each row's tokens of their cumulative acceptance beyond `least`."""
    values = np.maximum(draft.cumulative_acceptance - least, 0.0)
    return np.bincount(draft.row_of, values, minlength=len(draft.counts))


def _merge(suffix: Draft, trained: Draft, use_trained: np.ndarray) -> Draft:
    """Row by row one or the other: `use_trained` bool [B]."""
    a = suffix.select(~use_trained[suffix.row_of])
    b = trained.select(use_trained[trained.row_of])
    a.source = np.where(use_trained, TRAINED, SUFFIX).astype(np.int8)
    if not b.num_tokens:
        return a
    order = np.argsort(np.concatenate((a.row_of, b.row_of)), kind="stable")
    assert a.feature is not None and b.feature is not None

    def join(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        joined: np.ndarray = np.concatenate((x, y))[order]
        return joined

    return Draft(
        a.counts + b.counts,
        join(a.tokens, b.tokens),
        join(a.cumulative_acceptance, b.cumulative_acceptance),
        join(a.feature, b.feature),
        a.source,
    )
