"""Match rates of a drafter, by draft depth and by the gap between its two best scores, counted online.

A drafted token whose score exceeds the second best by much is seldom wrong. The policy changes, and with it the rates:
old counts decay. A cell with few counts is smoothed towards the rate of its gap at all depths, that rate towards a
prior, and the prior is scaled by how the whole table has done.

Numpy only, no clock. Legend: n observed nodes, D depths, G gap buckets, K candidates at a position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

_LOWEST, _HIGHEST = 1e-3, 0.999  # no token is certain: a product of rates must stay open to counts


class MatchRateTable:
    """Online estimates of P(match) given (depth, gap) for the best candidates, given (rank, gap) for their siblings.

    Both are conditional on the parent having been emitted, so products along a path are cumulative acceptance
    probabilities. Nothing here sees the drafted token of the step that it prices: rates come from earlier steps.
    """

    def __init__(
        self,
        depths: int,
        buckets: int,
        prior: np.ndarray | None = None,
        siblings: int = 3,
        bucket_width: float = 0.25,
        memory: float = 4096.0,
        strength: float = 16.0,
        refresh_every: int = 16,
    ):
        """`prior` float [G] or [D, G] stands in for counts, weighing as much as `strength` of them.

        `memory`: observations after which a count weighs 1/e. `refresh_every`: calls of `observe` between two updates
        of the rates (sooner at first, and if many nodes came).
        """
        gaps = (np.arange(buckets) + 0.5) * bucket_width
        if prior is None:  # of two near-equal candidates one is right about half of the time
            prior = 1.0 - 0.55 * np.exp(-gaps)
        ranks = np.arange(1, siblings + 1)[:, None]
        runners_up = 0.35 * np.exp(-gaps) / ranks
        shape = (depths, buckets)
        self._trunk = _Rates(np.broadcast_to(prior, shape), True, True, memory, strength, refresh_every)
        self._siblings = _Rates(runners_up, False, False, memory, strength, refresh_every)

    @property
    def rates(self) -> np.ndarray:
        """P(match) float32 [D, G] of best candidates, rising with the gap. Replaced, never written to."""
        return self._trunk.rates

    @property
    def sibling_rates(self) -> np.ndarray:
        """P(match) float32 [K - 1, G] of the second to K-th candidates, falling with their gap to the best."""
        return self._siblings.rates

    def observe(self, cells: np.ndarray, matched: np.ndarray) -> None:
        """Counts n best candidates whose parent was emitted: matched bool [n] and cells int [n] = depth * G + bucket.

        Depths count from 0, the last stands for all deeper ones. Mutates the counts.
        """
        self._trunk.observe(cells, matched)

    def observe_siblings(self, cells: np.ndarray, matched: np.ndarray) -> None:
        """As `observe`, for siblings: cells are rank * G + bucket; rank 0 is the second candidate."""
        self._siblings.observe(cells, matched)

    def state_dict(self) -> dict[str, Any]:
        """The counts. Brings the rates up to date first."""
        return {"trunk": self._trunk.state_dict(), "siblings": self._siblings.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes `state_dict`'s of a table of the same shape (ValueError otherwise)."""
        self._trunk.load_state_dict(state["trunk"])
        self._siblings.load_state_dict(state["siblings"])


class _Rates:
    """A table of rates, monotone along its columns. Observations wait as codes until the next refresh."""

    def __init__(
        self, prior: np.ndarray, pool: bool, rising: bool, memory: float, strength: float, refresh_every: int
    ):
        """`pool`: rows lean on the rates of all rows together. `rising`: rates grow with the column, else they fall."""
        self._prior = np.array(prior, np.float64)
        self._pool, self._rising = pool, rising
        self._memory, self._strength, self._every = memory, strength, refresh_every
        self._counts = np.zeros((*self._prior.shape, 2))  # [.., 0] missed, [.., 1] matched
        self._waiting: list[np.ndarray] = []
        self._waiting_nodes = self._calls = 0
        self.rates = self._estimate()

    def observe(self, cells: np.ndarray, matched: np.ndarray) -> None:
        """Keeps codes (2 * cell + matched) for the next refresh, and refreshes when it is due."""
        code = 2 * cells + matched
        self._waiting.append(code)
        self._waiting_nodes += len(code)
        self._calls += 1
        due = min(self._every, 1 + self._calls // 8)
        if len(self._waiting) >= due or self._waiting_nodes >= 16 * self._every:
            self._refresh()

    def _refresh(self) -> None:
        """Counts what waits and estimates the rates anew."""
        new = np.bincount(np.concatenate(self._waiting), minlength=self._counts.size)
        self._counts *= math.exp(-float(new.sum()) / self._memory)
        self._counts += new.reshape(self._counts.shape)
        self._waiting, self._waiting_nodes = [], 0
        self.rates = self._estimate()

    def _estimate(self) -> np.ndarray:
        strength = self._strength
        tried = self._counts.sum(-1)
        matched = self._counts[..., 1]
        # A drafter that is better or worse than the prior has it is so at all positions: a few counts show it.
        expected = float((tried * self._prior).sum()) + strength
        base = np.minimum(self._prior * ((float(matched.sum()) + strength) / expected), _HIGHEST)
        if self._pool:
            base = (matched.sum(0) + strength * base) / (tried.sum(0) + strength)
        rates = (matched + strength * base) / (tried + strength)
        # A monotone sequence from above and one from below; their mean leans to neither side.
        upward = rates if self._rising else rates[:, ::-1]
        above = np.maximum.accumulate(upward, axis=1)
        below = np.minimum.accumulate(upward[:, ::-1], axis=1)[:, ::-1]
        mean = np.clip((above + below) / 2, _LOWEST, _HIGHEST)
        return np.ascontiguousarray(mean if self._rising else mean[:, ::-1], np.float32)

    def state_dict(self) -> dict[str, Any]:
        if self._waiting:
            self._refresh()
        return {"counts": self._counts.tolist(), "calls": self._calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        counts = np.asarray(state["counts"], np.float64)
        if counts.shape != self._counts.shape:
            raise ValueError(f"match counts have shape {counts.shape}, not {self._counts.shape}")
        self._counts, self._calls = counts, int(state["calls"])
        self._waiting, self._waiting_nodes = [], 0
        self.rates = self._estimate()
