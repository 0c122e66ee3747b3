"""Who decides whether, and how far, a step speculates. Torch-free and without a clock: seconds come in as arguments.

Losslessness does not depend on a selector while verification is coupled: emitted tokens are those of plain decoding
whatever was drafted. With block verification it does: a decision must not know the token that it is about
(DSpark, appendix A). Then `admit` must be given survivals that depend on the position only, as the speculator does.
In either mode selectors use what was known before this step's verification, and nothing else.

Legend: B running rows (requests), N drafted nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median_low
from typing import Any, Protocol

import numpy as np

from megatron_tlt.rollout.spec.admission import best_of_each
from megatron_tlt.types import DraftStrategy

_AWAY = 4  # times what steps of a rest usually take


def regime_of(running: int) -> int:
    """Which regime of running requests a step belongs to: they double."""
    return running.bit_length()


class StrategySelector(Protocol):
    """Decides once per decoding step; steps with prompt chunks are not its business.

    Life of a step: `select`, then `admit` if something was drafted, then `observe`, also after a plain step. On the
    ranks of a tensor-parallel group but the first, the last two may be about a strategy that another rank selected.
    """

    def select(self, running: int) -> DraftStrategy:
        """The strategy for a step of `running` >= 1 requests; `NO_DRAFT` for plain decoding."""

    def rest(self, running: int) -> int:
        """Asked when `select` chose plain decoding: how many more steps may be made so without asking. See `Rests`."""

    def observe_rest(self, running: int, seconds: list[float]) -> None:
        """Some of these, in a row and all of `running` requests, took `seconds` each. Mutates the selector."""

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


class Rests:
    """Plain steps that nobody plans: only timed, which is cheaper, and does not make them slower than they are.

    What a selector grants holds for one regime, whatever comes in between (a request that ends).
    """

    def __init__(self, selector: StrategySelector, clock: Callable[[], float]):
        """`selector` grants rests, and is told how many seconds of `clock` their steps took."""
        self.selector, self._clock = selector, clock
        self._left: dict[int, int] = {}
        self._running, self._began = 0, 0.0  # requests of the step under way, 0: none is; when it began
        self._seconds: list[float] = []  # of the steps in a row that are over

    def ask(self, running: int) -> None:
        """After a plain step of `running` requests was chosen."""
        self._left[regime_of(running)] = self.selector.rest(running)

    def take(self, running: int) -> bool:
        """Whether the step of `running` requests that begins now is part of a rest. Counts it, or ends the rest."""
        regime = regime_of(running)
        if running != self._running or not self._left.get(regime):
            self.end()
        left = self._left.get(regime, 0)
        if not left:
            return False
        self._left[regime] = left - 1
        now = self._clock()
        if self._running:
            self._seconds.append(now - self._began)
        self._running, self._began = running, now
        return True

    def end(self) -> None:
        """What comes now is no such step. Tells the selector of those that were, after which it may want no more."""
        running, seconds = self._running, self._seconds
        if running:
            seconds.append(self._clock() - self._began)
            self._running, self._seconds = 0, []
            most = _AWAY * median_low(seconds)  # beyond, the engine waited for its caller
            self.selector.observe_rest(running, [min(s, most) for s in seconds])
            regime = regime_of(running)
            self._left[regime] = min(self._left[regime], self.selector.rest(running))

    def forget(self) -> None:
        """The selector is another, or has learned something else: nothing is granted."""
        self._left.clear()
        self._running, self._seconds = 0, []


class WholeStrategies:
    """What selectors share that only choose among strategies: no rests, and as many nodes as the strategy says."""

    def rest(self, running: int) -> int:
        """See `StrategySelector.rest`: none."""
        return 0

    def observe_rest(self, running: int, seconds: list[float]) -> None:
        """See `StrategySelector.observe_rest`: never called, for there are no rests."""

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
