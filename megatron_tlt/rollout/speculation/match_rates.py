"""How often drafted tokens match, by the kind of token (a cell of a table), counted online.

The policy changes, and with it the rates: old counts decay. A cell with few counts is drawn to a prior, which is scaled
by the ratio of all matches to those that the prior expects, and in an ordered table to the rate of its column. Numpy
only, no clock.
"""

from __future__ import annotations

import math

import numpy as np

_LOWEST, _HIGHEST = 1e-3, 0.999  # no token is certain: a product of rates must stay open to counts
_FADED = 64.0  # observations that a former drafter's counts weigh at most
_REFRESH_EVERY = 16  # calls of `observe` between two estimates (sooner at first, and if many tokens came)


class MatchRates:
    """P(a drafted token is the policy's, given that all before it were emitted) of a table of cells.

    Products along a draft are cumulative acceptance probabilities. Rates come from earlier steps only.
    """

    def __init__(
        self,
        prior: np.ndarray,
        strength: float,
        memory: float,
        is_ordered: bool = False,
    ):
        """`prior` float [rows, columns] or [cells] weighs as much as `strength` observations of each cell.

        `memory`: observations of the table after which a count weighs 1/e. `is_ordered`: rows lean on the rates of all
        rows together, and rates grow with the column.
        """
        self._prior = np.array(prior, np.float64)
        self._strength, self._memory, self._is_ordered = strength, memory, is_ordered
        self._counts = np.zeros((*self._prior.shape, 2))  # [.., 0] missed, [.., 1] matched
        self._waiting: list[np.ndarray] = []
        self._waiting_tokens = self._calls = 0
        self.rates = np.empty(self._prior.shape, np.float32)  # written in place: C may keep its address
        self._estimate()

    def observe(self, cells: np.ndarray, matched: np.ndarray) -> None:
        """Counts n drafted tokens behind emitted ones: cells int [n], matched bool [n]. Mutates counts and rates."""
        self._waiting.append(2 * cells + matched)
        self._waiting_tokens += len(cells)
        self._calls += 1
        due = min(_REFRESH_EVERY, 1 + self._calls // 8)
        if len(self._waiting) >= due or self._waiting_tokens >= 16 * _REFRESH_EVERY:
            self._refresh()

    def fade(self) -> None:
        """What was counted so far is of another drafter: it weighs little from now on. Mutates counts and rates."""
        if self._waiting:
            self._refresh()
        self._counts *= min(1.0, _FADED / max(float(self._counts.sum()), 1.0))
        self._estimate()

    def _refresh(self) -> None:
        """Counts the waiting observations and estimates the rates anew."""
        new = np.bincount(np.concatenate(self._waiting), minlength=self._counts.size)
        self._counts *= math.exp(-float(new.sum()) / self._memory)
        self._counts += new.reshape(self._counts.shape)
        self._waiting, self._waiting_tokens = [], 0
        self._estimate()

    def _estimate(self) -> None:
        strength = self._strength
        tried = self._counts.sum(-1)
        matched = self._counts[..., 1]
        # A drafter that is better or worse than the prior is so in all cells: a few counts show it.
        expected = float((tried * self._prior).sum()) + strength
        base = np.minimum(self._prior * ((float(matched.sum()) + strength) / expected), _HIGHEST)
        if self._is_ordered:
            base = (matched.sum(0) + strength * base) / (tried.sum(0) + strength)
        rates = (matched + strength * base) / (tried + strength)
        if self._is_ordered:
            # A monotone sequence from above and one from below; their mean leans to neither side.
            above = np.maximum.accumulate(rates, axis=1)
            below = np.minimum.accumulate(rates[:, ::-1], axis=1)[:, ::-1]
            rates = (above + below) / 2
        np.clip(rates, _LOWEST, _HIGHEST, out=self.rates, casting="same_kind")
