"""Which drafted tokens are accepted: chances by position, drawn anew for every token. Torch-free.

A drafter estimates the acceptance of each token: its chance p is drawn from a beta distribution around the
position's rate, the token is right with chance p, and the cumulative acceptance that the selector is shown is the
product of these. So it is calibrated, as the production drafters' own estimates are made to be. A drafter that is
adapted to the policy (quality 1) has `rates`, one that never saw it (0) `stale_rates`; in between the rates are too.

Legend: B rows (requests), D drafted positions, N drafted tokens, row by row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_tlt.config.sim import AcceptanceSection
from megatron_tlt.types import DraftStrategy


@dataclass(slots=True)
class SimDraft:
    """Drafted tokens, and which of them are the policy's."""

    counts: np.ndarray  # int64 [B]
    emitted: np.ndarray  # int64 [B], tokens that each row emits: at least 1
    passes: int  # of a drafter that has one for each position

    def accepted(self, draft_len: int) -> np.ndarray:
        """`StepMeasurement.accepted` int64 [draft_len]."""
        hits: np.ndarray = self.emitted[:, None] - 1 > np.arange(draft_len)
        return hits.sum(0)


class AcceptanceModel:
    """One kind of drafter. `quality` is set from outside, between rollouts."""

    def __init__(self, section: AcceptanceSection, quality: float = 1.0):
        self._section = section
        self.quality = quality

    def rates(self, depth: int) -> np.ndarray:
        """Chances float64 [depth] at the present quality."""
        fresh = _extended(self._section.rates, depth)
        stale = _extended(self._section.stale_rates or self._section.rates, depth)
        return self.quality * fresh + (1 - self.quality) * stale

    def draft(self, strategy: DraftStrategy, lengths: np.ndarray, rng: np.random.Generator) -> SimDraft:
        """A draft for rows that may draft up to `lengths` int [B] tokens in a row."""
        section = self._section
        lengths = np.minimum(lengths, strategy.draft_len)
        if section.coverage < 1:
            lengths = np.where(rng.random(len(lengths)) < section.coverage, lengths, 0)
        if section.reach < 1:
            lengths = np.minimum(lengths, rng.geometric(1 - section.reach, len(lengths)))
        depth = int(lengths.max(initial=0))
        rates = self.rates(depth) if depth else np.zeros(0)
        spread = section.spread
        chances = rng.beta(
            np.maximum(rates * spread, 1e-9), np.maximum((1 - rates) * spread, 1e-9), (len(lengths), depth)
        )
        cumulative_acceptance = np.cumprod(chances, axis=1)
        keep = np.arange(depth) < lengths[:, None]
        if strategy.min_cumulative_acceptance:
            keep &= cumulative_acceptance >= strategy.min_cumulative_acceptance
        matches = rng.random(cumulative_acceptance.shape) < chances
        kept = int(keep.any(axis=0).sum())
        passes = min(depth, kept + 1)  # a token's chance is known after its pass
        right = np.concatenate((keep & matches, np.zeros((len(lengths), 1), bool)), axis=1)
        return SimDraft(keep.sum(axis=1), (~right).argmax(axis=1) + 1, passes)


def _extended(rates: tuple[float, ...], depth: int) -> np.ndarray:
    """`rates`, the last one repeated, [depth]."""
    known = np.array(rates[:depth])
    return np.concatenate((known, np.full(depth - len(known), rates[-1])))
