"""Who decides whether, and how far, a step speculates. Torch-free and without a clock: seconds come in as arguments.

Losslessness does not depend on a selector while verification is coupled: emitted tokens are those of plain decoding
whatever was drafted. With block verification it does: a decision must not know the token that it is about
(DSpark, appendix A). Then `admit` must be given survivals that depend on the position only, as the speculator does.
In either mode selectors use what was known before this step's verification, and nothing else.

Legend: B running rows (requests), N drafted nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from megatron_tlt.rollout.spec.admission import best_of_each
from megatron_tlt.types import DraftStrategy


def regime_of(running: int) -> int:
    """Which regime of running requests a step belongs to: they double."""
    return running.bit_length()


class Rests:
    """Plain steps that a selector granted: of one regime, used up whatever comes in between (a request that ends)."""

    def __init__(self) -> None:
        self._left: dict[int, int] = {}

    def grant(self, running: int, steps: int) -> None:
        """So many plain steps to come, in the regime of `running` requests."""
        self._left[regime_of(running)] = steps

    def take(self, running: int) -> bool:
        """Whether a step of `running` requests is one of them. Counts it."""
        regime = regime_of(running)
        left = self._left.get(regime, 0)
        if left:
            self._left[regime] = left - 1
        return left > 0


class StrategySelector(Protocol):
    """Decides once per decoding step; steps with prompt chunks are not its business.

    Life of a step: `select`, then `admit` if something was drafted, then `observe`, also after a plain step. On the
    ranks of a tensor-parallel group but the first, the last two may be about a strategy that another rank selected.
    """

    def select(self, running: int) -> DraftStrategy:
        """The strategy for a step of `running` >= 1 requests; `NO_DRAFT` for plain decoding."""

    def rest(self, running: int) -> int:
        """Asked when `select` chose plain decoding: how many more steps to make so, unobserved (see `Rests`).

        Mutates the selector, which counts on them.
        """

    def admit(
        self,
        strategy: DraftStrategy,
        running: int,
        survival: np.ndarray,
        depths: np.ndarray,
        counts: np.ndarray,
        parents: np.ndarray | None,
    ) -> np.ndarray:
        """Mask bool [N] of the drafted nodes that are fed to the policy; closed under ancestors.

        survival float32 [N], never growing from parent to child; depths int32 [N] from 1; counts int32 [B], nodes of
        each row; parents int32 [N], index within the row or -1, always before the child (None: chains).
        """

    def observe(
        self,
        strategy: DraftStrategy,
        running: int,
        rows_fed: int,
        emitted: np.ndarray,
        draft_seconds: float,
        step_seconds: float,
    ) -> None:
        """The step is over: B roots and admitted nodes were `rows_fed` rows; row i emitted `emitted[i]` tokens.

        Proposing took `draft_seconds` (0 for a plain step), and what followed `step_seconds`. Mutates the selector.
        """

    def state_dict(self) -> dict[str, Any]:
        """What was learned: numbers, strings, lists and dicts."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes `state_dict`'s. Ignores that of another selector."""


class WholeStrategies:
    """What selectors share that only choose among strategies: no rests, and as many nodes as the strategy says."""

    def rest(self, running: int) -> int:
        """See `StrategySelector.rest`: none."""
        return 0

    def admit(
        self,
        strategy: DraftStrategy,
        running: int,
        survival: np.ndarray,
        depths: np.ndarray,
        counts: np.ndarray,
        parents: np.ndarray | None,
    ) -> np.ndarray:
        """See `StrategySelector.admit`: the `num_verify_tokens - 1` likeliest of each request, all if it is 0."""
        if strategy.num_verify_tokens == 0:
            return np.ones(len(survival), bool)
        return best_of_each(survival, counts, strategy.num_verify_tokens - 1)


class FixedSelector(WholeStrategies):
    """Always the same strategy."""

    def __init__(self, strategy: DraftStrategy):
        self._strategy = strategy

    def select(self, running: int) -> DraftStrategy:
        """See `StrategySelector.select`."""
        return self._strategy

    def observe(
        self,
        strategy: DraftStrategy,
        running: int,
        rows_fed: int,
        emitted: np.ndarray,
        draft_seconds: float,
        step_seconds: float,
    ) -> None:
        """Nothing to learn."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing was learned."""
        return {"selector": "fixed"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to take."""
