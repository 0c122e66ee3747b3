"""What drafters guess right: chances by position, drawn anew for every token. Torch-free.

A drafter estimates the acceptance of each token: its chance p is drawn from a beta distribution around the
position's rate, the token is right with chance p, and the cumulative acceptance that the selector is shown is the
product of these. So it is calibrated, as the production drafters' own estimates are made to be. A drafter that is
adapted to the policy (quality 1) has `rates`, one that never saw it (0) `stale_rates`; in between the rates are too.

Legend: B rows (requests), D drafted positions, N nodes; nodes stand row by row, the trunk first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_tlt.config.sim import AcceptanceSection
from megatron_tlt.types import DraftStrategy


@dataclass(slots=True)
class SimDraft:
    """Drafted nodes as `draft.prune` takes them, and which of them are the policy's."""

    cumulative_acceptance: np.ndarray  # float32 [N]
    depths: np.ndarray  # int32 [N], from 1
    counts: np.ndarray  # int32 [B]
    matches: np.ndarray  # bool [N], given that its parent was emitted
    passes: int  # of the trained drafter

    @property
    def num_nodes(self) -> int:
        """N."""
        return len(self.cumulative_acceptance)

    def emitted(self, keep: np.ndarray) -> np.ndarray:
        """Tokens int64 [B] that each row emits if the nodes of mask `keep` [N] are verified: at least 1."""
        rows = np.repeat(np.arange(len(self.counts)), self.counts)
        right = keep & self.matches
        within = np.arange(self.num_nodes) - np.repeat(np.cumsum(self.counts) - self.counts, self.counts)
        is_trunk = within == self.depths - 1
        shape = len(self.counts), int(self.depths.max(initial=0)) + 1
        trunk, side = np.zeros(shape, bool), np.zeros(shape, bool)  # right nodes [B, D + 1]
        for grid, found in ((trunk, right & is_trunk), (side, right & ~is_trunk)):
            grid[rows[found], self.depths[found] - 1] = True
        run = (~trunk).argmax(axis=1)  # trunk tokens emitted
        emitted: np.ndarray = run + side[np.arange(len(run)), run] + 1
        return emitted

    def by_position(
        self, keep: np.ndarray, emitted: np.ndarray, draft_len: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """`StepMeasurement.reached` and `accepted` int64 [draft_len] of a step that gave `emitted` tokens int64 [B]."""
        rows, position = np.repeat(np.arange(len(self.counts)), self.counts), self.depths - 1
        reached = keep & (position < emitted[rows])
        accepted = (emitted[:, None] - 1 > np.arange(draft_len)).sum(0)
        return np.bincount(position[reached], minlength=draft_len), accepted


class Acceptance:
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
        """What is proposed for rows that may draft up to `lengths` int [B] tokens in a row."""
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
        passes = min(depth, kept + 1)  # that a token is not worth it is known after its pass
        counts = keep.sum(axis=1)
        if strategy.topk == 1:
            depths = np.broadcast_to(np.arange(1, depth + 1, dtype=np.int32), keep.shape)[keep]
            return SimDraft(
                cumulative_acceptance[keep].astype(np.float32),
                depths,
                counts.astype(np.int32),
                matches[keep],
                passes,
            )
        return self._with_siblings(strategy.topk, chances, cumulative_acceptance, keep, matches, rng, passes)

    def _with_siblings(
        self,
        topk: int,
        chances: np.ndarray,
        cumulative_acceptance: np.ndarray,
        keep: np.ndarray,
        matches: np.ndarray,
        rng: np.random.Generator,
        passes: int,
    ) -> SimDraft:
        """A trunk with `topk - 1` siblings beside each of its nodes; siblings have no children."""
        B, depth = keep.shape
        ranks = self._section.siblings * 0.5 ** np.arange(topk - 1)
        ranks = ranks / max(1.0, float(ranks.sum()))
        before = np.concatenate((np.ones((B, 1)), cumulative_acceptance[:, :-1]), axis=1) * (1 - chances)
        values = np.concatenate(
            (cumulative_acceptance[:, :, None], before[:, :, None] * ranks), axis=2
        )  # [B, D, K]
        draw = rng.random((B, depth, 1))
        edges = np.concatenate(([0.0], np.cumsum(ranks)))
        side = (draw >= edges[:-1]) & (draw < edges[1:]) & ~matches[:, :, None]
        right = np.concatenate((matches[:, :, None], side), axis=2)
        order = lambda a: np.concatenate((a[:, :, 0], a[:, :, 1:].reshape(B, -1)), axis=1)  # noqa: E731
        levels = np.broadcast_to(np.arange(1, depth + 1, dtype=np.int32)[None, :, None], values.shape)
        mask = order(np.broadcast_to(keep[:, :, None], values.shape))
        depths = order(levels)[mask]
        return SimDraft(
            order(values)[mask].astype(np.float32),
            depths,
            mask.sum(axis=1).astype(np.int32),
            order(right)[mask],
            passes,
        )


def _extended(rates: tuple[float, ...], depth: int) -> np.ndarray:
    """`rates`, the last one repeated, [depth]."""
    known = np.array(rates[:depth])
    return np.concatenate((known, np.full(depth - len(known), rates[-1])))
