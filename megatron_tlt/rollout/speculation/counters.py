"""Counters of speculation, for `SpeculationStats`."""

from __future__ import annotations

import time

import numpy as np

from megatron_tlt.models.decoders.draft import Draft
from megatron_tlt.types import NO_DRAFT, SpeculationStats, StepMeasurement


class SpeculationCounters:
    """Gathers `SpeculationStats` step by step."""

    def __init__(self) -> None:
        self._stats = SpeculationStats()
        self._has_drafted = False  # whether the last decoding step had drafted tokens

    def add(self, step: StepMeasurement, draft: Draft | None) -> None:
        """A decoding step that verified `draft`; None: a plain one. Rows without a drafted token are not counted: they
        emit their own next token, whatever the drafts. Mutates the counters.
        """
        stats = self._stats
        name = NO_DRAFT.name if draft is None else step.strategy.name
        stats.steps_by_strategy[name] = stats.steps_by_strategy.get(name, 0) + 1
        stats.draft_seconds += step.draft_seconds
        if self._has_drafted != (draft is not None):
            self._has_drafted = draft is not None
            stats.switches.append((time.perf_counter(), self._has_drafted))
        if draft is None:
            return
        rows = int(np.count_nonzero(draft.counts))
        emitted = step.num_emitted - (step.num_running - rows)
        stats.row_steps += rows
        stats.drafted_tokens += draft.num_tokens
        stats.accepted_tokens += int(np.sum(step.accepted))
        stats.emitted_tokens += emitted
        stats.verify_seconds += step.step_seconds
        batch = stats.by_batch.setdefault(step.num_running, [0, 0])
        batch[0] += rows
        batch[1] += emitted
        drafted = np.bincount(draft.positions)
        _accumulate(stats.drafted_at, drafted)
        _accumulate(stats.accepted_at, step.accepted[: len(drafted)])

    def add_pre_rolled(self, draft: Draft, accepted: np.ndarray) -> None:
        """The part of a verified draft that is of pre-rollouts; `accepted` bool [N]. Mutates the counters."""
        self._stats.pre_rolled_rows += int(np.count_nonzero(draft.counts))
        self._stats.pre_rolled_drafted += draft.num_tokens
        self._stats.pre_rolled_accepted += int(np.count_nonzero(accepted))

    def take(self) -> SpeculationStats:
        """Everything since the last call. Resets."""
        stats, self._stats = self._stats, SpeculationStats()
        self._has_drafted = False
        return stats


def _accumulate(totals: list[int], counts: np.ndarray) -> None:
    """Adds `counts` int [L] to the first L of `totals`, which grows where it is shorter."""
    totals.extend([0] * (len(counts) - len(totals)))
    for at, count in enumerate(counts.tolist()):
        totals[at] += count
