"""What a strategy selector is, and the fixed one. Torch-free and without a clock: seconds come in as arguments.

Losslessness does not depend on a selector: the emitted tokens are those of plain decoding whatever was drafted.
Legend: B running requests, N drafted nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from megatron_tlt.rollout.spec.admission import best_of_each
from megatron_tlt.types import DraftStrategy, StepMeasurement


def regime_of(running: int) -> int:
    """Which regime of running requests a step belongs to: they double."""
    return running.bit_length()


class StrategySelector(Protocol):
    """Chooses how every decoding step speculates. Steps with prefill chunks are not selected for, and not recorded.

    The calls of a step: `select`, then `prune` if something was drafted, then `record`, also after a plain step. On
    tensor-parallel ranks other than the first, `prune` and `record` may be for a strategy that rank 0 selected.
    """

    def select(self, num_running: int) -> DraftStrategy:
        """The strategy for a step of `num_running` >= 1 requests; `NO_DRAFT` for plain decoding."""

    def prune(
        self,
        strategy: DraftStrategy,
        num_running: int,
        cumulative_acceptance: np.ndarray,
        depths: np.ndarray,
        counts: np.ndarray,
        parents: np.ndarray | None,
    ) -> np.ndarray:
        """Mask bool [N] of the drafted nodes that are fed to the policy; closed under ancestors.

        cumulative_acceptance float32 [N], never growing from parent to child; depths int32 [N] from 1; counts int32
        [B], nodes of each row; parents int32 [N], index within the row or -1, always before the child (None: chains).
        """

    def record(self, measurement: StepMeasurement) -> None:
        """Learns from one measured decoding step. Mutates the selector."""

    def state_dict(self) -> dict[str, Any]:
        """What was learned: numbers, strings, lists and dicts."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes `state_dict`'s. Ignores that of another selector."""


class WholeStrategies:
    """Shared by selectors that only choose among strategies: as many nodes as the strategy says."""

    def prune(
        self,
        strategy: DraftStrategy,
        num_running: int,
        cumulative_acceptance: np.ndarray,
        depths: np.ndarray,
        counts: np.ndarray,
        parents: np.ndarray | None,
    ) -> np.ndarray:
        """See `StrategySelector.prune`: the `num_verify_tokens - 1` likeliest of each request, all if it is 0."""
        if strategy.num_verify_tokens == 0:
            return np.ones(len(cumulative_acceptance), bool)
        return best_of_each(cumulative_acceptance, counts, strategy.num_verify_tokens - 1)


class FixedSelector(WholeStrategies):
    """Always the same strategy."""

    def __init__(self, strategy: DraftStrategy):
        self._strategy = strategy

    def select(self, num_running: int) -> DraftStrategy:
        """See `StrategySelector.select`."""
        return self._strategy

    def record(self, measurement: StepMeasurement) -> None:
        """Nothing to learn."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing was learned."""
        return {"selector": "fixed"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to take."""
