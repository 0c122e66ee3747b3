"""What is counted of steps with drafts."""

from __future__ import annotations

import numpy as np

from megatron_tlt.models.decoders.draft import Draft
from megatron_tlt.rollout.speculation.counters import SpeculationCounters
from megatron_tlt.types import DraftStrategy, StepMeasurement


def test_only_rows_with_a_draft_are_counted() -> None:
    """One of 64 rows verifies 31 tokens, all of them right."""
    counters, counts = SpeculationCounters(), np.zeros(64, np.int32)
    counts[5] = 31
    draft = Draft(counts, np.zeros(31, np.int32), np.ones(31, np.float32))
    counters.add(StepMeasurement(DraftStrategy("suffix", 31), 64, 95, 0.1, 1.0, 63 + 32, 31, np.ones(31, int)), draft)
    stats = counters.take()
    assert (stats.row_steps, stats.emitted_tokens, stats.accept_length) == (1, 32, 32.0)
    assert stats.by_batch == {64: [1, 32]}
