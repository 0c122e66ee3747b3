"""How often the suffix drafter's tokens match, by kind of token: counted online, from a prior.

Trunk tokens are classified by the log odds of their share in the interpolated distribution, by the longest context and
by the number of candidates (`csrc/suffix_draft.c`); siblings by their rank and by the trunk token's own rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_tlt.models.native.suffix_abi import FEATURES, MAX_TOPK, ODDS, RATES, STEPS

_STRENGTH = 12.0  # observations that the prior weighs as much as
_MEMORY = 4096.0  # observations of a cell after which its counts are halved: the policy changes


class MatchRates:
    """P(token is the policy's, given that its parent was emitted), float32 [FEATURES]."""

    def __init__(self) -> None:
        self._tried = np.full(FEATURES, _STRENGTH)
        self._matched = _prior() * _STRENGTH
        self.rates = np.empty(FEATURES, np.float32)  # written in place: the C side keeps its address
        self._update(slice(None))

    def observe(self, feature: np.ndarray, reached: np.ndarray, accepted: np.ndarray) -> None:
        """Verdicts on n nodes of kinds `feature` int [n]: bool [n] parent was emitted; bool [n] node was emitted.

        Mutates the counts and rates of these kinds.
        """
        kinds = feature[reached]
        np.add.at(self._tried, kinds, 1.0)
        np.add.at(self._matched, kinds, accepted[reached])
        self._update(kinds)

    def _update(self, kinds: np.ndarray | slice) -> None:
        faded = np.where(self._tried[kinds] > _MEMORY, 0.5, 1.0)
        self._tried[kinds] *= faded
        self._matched[kinds] *= faded
        self.rates[kinds] = self._matched[kinds] / self._tried[kinds]

    def state_dict(self) -> dict[str, Any]:
        """The counts."""
        return {"tried": self._tried.tolist(), "matched": self._matched.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes `state_dict`'s. Raises ValueError if it has other kinds of tokens."""
        tried, matched = np.array(state["tried"]), np.array(state["matched"])
        if tried.shape != (FEATURES,) or matched.shape != (FEATURES,):
            raise ValueError(f"match counts of {tried.shape} kinds, not {FEATURES}")
        self._tried, self._matched = tried, matched
        self._update(slice(None))


def _prior() -> np.ndarray:
    """Rates before anything was seen: a logistic fit to replays of the demo policy's answers, rounded."""
    odds = 0.6 * (np.arange(ODDS) - 1.5)
    context = np.array([-1.4, 0.0, 0.4, 0.4, 0.5])  # contexts of 1-2, 3-4, 5-7, 8-11, 12 or more tokens
    candidates = np.array([0.0, -0.8, -1.2, -1.3, -1.4])  # 1, 2, 3-4, 5-8, 9 or more
    assert len(context) == len(candidates) == STEPS
    logit = odds[:, None, None] + context[:, None] + candidates
    trunk = 1 / (1 + np.exp(-logit))
    missed = 1 - (np.arange(RATES) + 0.5) / RATES  # of the trunk's token
    ranks = 0.35 / np.arange(1, MAX_TOPK)
    return np.concatenate((trunk.ravel(), (ranks[:, None] * missed).ravel()))
