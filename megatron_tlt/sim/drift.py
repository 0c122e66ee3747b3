"""How far a pre-rolled response is that of a later policy: the drift as a number. Torch-free.

Both responses are drawn with the same noise, so each token is the pre-rolled one but for a small chance, the `hazard`.
Behind the first mismatch the place in the pre-rolled response is found again after some tokens, for a few tokens only.

    pre-rolled   ========================x       p tokens, unfinished ones too
    response     ==============|-==--==-=|------
                  matching      parted    the drafter's
    drafts        pre-rolled    both      the drafter's

Legend: P prompts, n samples of a prompt.
"""

from __future__ import annotations

import numpy as np

from megatron_tlt.config.sim import SimPreRolloutSection

_GROWTH = 0.65  # exponent of the hazard in the updates between two policies, fitted to counts 1 to 12 apart
_NEVER = 1e-12  # a chance that no response meets


class Drift:
    """The chances, from the configuration."""

    def __init__(self, section: SimPreRolloutSection):
        self._section = section

    def matching(self, there: np.ndarray, updates: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Tokens before the first mismatch of responses that an earlier policy drew up to `there`; all int64 [P, n].

        `updates`: of the policy, between the two.
        """
        hazard = np.minimum(1.0, self._section.hazard * updates.astype(np.float64) ** _GROWTH)
        first = rng.geometric(np.maximum(hazard, _NEVER), there.shape) - 1
        return np.where(hazard > 0, np.minimum(there, first), there)

    def acceptance(self, count: int) -> np.ndarray:
        """The chance that so many tokens of a matching response are right, float32 [count], from 1."""
        return ((1 - self._section.hazard) ** np.arange(1, count + 1)).astype(np.float32)

    def emitted(self, drafted: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Tokens that a step gives rows which match, and verify `drafted` tokens; int64 [B] each."""
        hazard = max(self._section.hazard, _NEVER)
        return np.minimum(rng.geometric(hazard, len(drafted)), drafted + 1)

    def tokens_matching(self, drafted: float, others: float) -> float:
        """Mean tokens that a step with `drafted` tokens gives a matching row; a row without drafts gets `others`."""
        return max(others, _tokens(self._section.hazard, drafted))

    def tokens_parted(self, drafted: float, others: float) -> tuple[float, float]:
        """Mean tokens that a step gives a row behind a mismatch, and the share of its steps in which it has a place. A
        step without one gives it `others` tokens by the drafter.
        """
        if not self._section.found:
            return others, 0.0
        there = max(others, _tokens(self._section.found_hazard, drafted))
        steps = 1 / (self._section.found_hazard * there)  # until the place is lost
        lost = max(1.0, 1 / (self._section.found * others))  # until it is found
        return (steps * there + lost * others) / (steps + lost), steps / (steps + lost)


def _tokens(hazard: float, drafted: float) -> float:
    """1 + (1 - hazard) + ... + (1 - hazard)^drafted: the accepted ones and the one drawn behind them."""
    return (1 - (1 - hazard) ** (drafted + 1)) / hazard if hazard else drafted + 1
