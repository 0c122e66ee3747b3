"""Speculates in the way that is measured to be fastest at so many requests, and not at all where none is.

A `Race` for each regime of running requests (they double) compares whole strategies by the seconds that their steps
take, everything between two steps included: plain decoding, a few fixed draft lengths, and drafts of which each token
must be worth its price. This last one, per request and per token, is what the step costs are learned for: a drafted
token is worth its cumulative acceptance, in tokens; it costs a policy row, and before that a drafter row, at the rate
of tokens per second that the strategy achieves. While drafting, both lie ahead
(`DraftStrategy.min_cumulative_acceptance`); then only the policy row does (`prune`). Source of the greedy admission:
DSpark, Algorithm 1; why a rate: `admission.best_of_all`.

Torch-free, no clock of its own. Legend: B running rows (requests), N drafted nodes, T = B + N rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_tlt.rollout.spec.admission import best_of_all, best_of_chain
from megatron_tlt.rollout.spec.costs import DraftCosts, StepCosts
from megatron_tlt.rollout.spec.race import PLAIN, Race
from megatron_tlt.rollout.spec.selector import regime_of
from megatron_tlt.types import NO_DRAFT, DraftStrategy, StepMeasurement

_LENGTHS = (2, 5, 8, 11)  # drafted tokens of the strategies that feed all of them
_PRICED = 1e-6  # least cumulative acceptance of a strategy that admits by price: 0 feeds everything
_LOUDEST = (
    0.95  # largest cumulative acceptance ever required: without drafts nothing would be learned of them
)
_FRESH = 64  # uses of prices before they are made anew, sooner at first
_SELDOM, _YOUNG = (
    4,
    256,
)  # of the best arm's steps costs are learned from every fourth, after so many in a regime
_SPANS = np.arange(1, 9)  # rows ahead, in half batches, that a row's price is looked for in
_VERSION = 4  # of the state


class _Prices:
    """What one batch size needs, kept until costs have moved."""

    __slots__ = ("age", "cost_list", "costs", "plain", "strategies", "uses")

    def __init__(self) -> None:
        self.age = self.uses = 0
        self.costs, self.cost_list = np.zeros(0), [0.0]
        self.plain = 0.0  # seconds of a plain step
        self.strategies: list[DraftStrategy] = []  # the arms, with their least cumulative acceptance


class CostModelSelector:
    """See `StrategySelector`. Nothing here is a constant of a machine: costs are measured, and so is what they buy."""

    def __init__(self, kind: str, draft_len: int, topk: int = 1):
        """For a drafter of `kind`; "hybrid" also plays its parts alone."""
        self.kind, self._draft_len, self._topk = kind, draft_len, topk
        self.arms = _arms(kind, draft_len, topk)
        self._index = {
            (arm.kind, arm.draft_len, arm.min_cumulative_acceptance > 0): i for i, arm in enumerate(self.arms)
        }
        self._index["none", 0, False] = PLAIN
        self.step_costs = StepCosts()
        self._draft_costs = {arm.kind: DraftCosts(arm.kind) for arm in self.arms if arm.kind != "none"}
        self._races: dict[int, Race] = {}
        self._prices: dict[int, _Prices] = {}
        self._drafted = 0  # tokens in the trunks of the present step's draft
        self._last_kind = "none"
        self._steps = 0

    def select(self, num_running: int) -> DraftStrategy:
        """See `StrategySelector.select`. A further token must promise its `min_cumulative_acceptance`."""
        race = self._race(num_running)
        self._drafted = 0
        if race.playing == PLAIN or not self.step_costs.is_known:
            return NO_DRAFT
        return self._priced(num_running).strategies[race.playing]

    def prune(
        self,
        strategy: DraftStrategy,
        num_running: int,
        cumulative_acceptance: np.ndarray,
        depths: np.ndarray,
        counts: np.ndarray,
        parents: np.ndarray | None,
    ) -> np.ndarray:
        """See `StrategySelector.prune`: all nodes, or those worth their rows at the strategy's rate."""
        nodes = len(cumulative_acceptance)
        self._drafted = nodes // strategy.topk
        if not strategy.min_cumulative_acceptance or not self.step_costs.is_known:
            return np.ones(nodes, bool)
        prices = self._priced(num_running)
        if len(prices.costs) <= nodes:
            self._extend(prices, num_running, nodes)
        rate = self._rate(num_running, self._arm(strategy), prices.plain)
        if num_running == 1 and parents is None:
            chosen: np.ndarray = np.arange(nodes) < best_of_chain(
                cumulative_acceptance.tolist(), prices.cost_list, rate
            )
            return chosen
        return best_of_all(cumulative_acceptance, prices.costs, rate)

    def record(self, measurement: StepMeasurement) -> None:
        """See `StrategySelector.record`."""
        strategy, running = measurement.strategy, measurement.num_running
        step_seconds, draft_seconds = measurement.step_seconds, measurement.draft_seconds
        race, arm = self._race(running), self._arm(strategy)
        changed, self._last_kind = strategy.kind != self._last_kind, strategy.kind
        self._steps += 1
        often = race.is_trial or race.time < _YOUNG or self._steps % _SELDOM == 0
        if not self.step_costs.is_known or (often and not race.is_cold and not changed):
            self.step_costs.observe(running, measurement.num_rows, step_seconds)
            if strategy.kind != "none":
                self._draft_costs[strategy.kind].observe(running, self._drafted, draft_seconds)
        prices, fed = self._priced(running), measurement.num_rows - running
        spent = (draft_seconds + step_seconds) / prices.plain
        usual = prices.cost_list[min(fed, len(prices.cost_list) - 1)] / prices.plain
        race.observe(arm, running, measurement.num_emitted / running, spent, usual, fed / running, changed)

    # Prices

    def _arm(self, strategy: DraftStrategy) -> int:
        return self._index[strategy.kind, strategy.draft_len, strategy.min_cumulative_acceptance > 0]

    def _race(self, running: int) -> Race:
        """The regime's, which begins when it is first met."""
        key = regime_of(running)
        race = self._races.get(key)
        if race is None:
            race = self._new_race(key)
            self._races[key] = race
        return race

    def _new_race(self, key: int) -> Race:
        return Race(len(self.arms), key, self._races, lambda arm, fed: self._cost(arm, key, fed))

    def _cost(self, arm: int, key: int, fed: float) -> float:
        """Plain steps that a step of an arm costs in the middle of a regime, if it feeds `fed` nodes a request."""
        running = max(1, 3 << key >> 2)
        nodes = round(fed * running)
        costs = self.step_costs.curve(running, np.array([running, running + nodes]))
        drafts = self._draft_costs[self.arms[arm].kind]
        seconds = float(costs[1]) + (drafts.seconds(running, nodes) if drafts.is_known else 0.0)
        return seconds / float(costs[0])

    def _rate(self, running: int, arm: int, plain: float) -> float:
        """Tokens per second of an arm, or, while it is unknown, of the best one."""
        race = self._race(running)
        known = race.arms[arm]
        return (known.gain if known.spent else race.top) * running / plain

    def _priced(self, running: int) -> _Prices:
        prices = self._prices.get(running)
        if prices is None:
            prices = self._prices[running] = _Prices()
        prices.age -= 1
        if prices.age < 0:
            self._reprice(prices, running)
        return prices

    def _reprice(self, prices: _Prices, running: int) -> None:
        prices.uses += 1
        prices.age = min(_FRESH, 2 * prices.uses)
        self._extend(prices, running, max(len(prices.costs) - 1, running * self._draft_len * self._topk))
        prices.plain = float(prices.costs[0])
        prices.strategies = [
            replace(arm, min_cumulative_acceptance=self._least(prices, running, i))
            if arm.min_cumulative_acceptance
            else arm
            for i, arm in enumerate(self.arms)
        ]

    def _least(self, prices: _Prices, running: int, arm: int) -> float:
        """What a drafted token must promise: the price of its two rows where the arm's drafts end at present.

        On a stair the policy row's price is that of the best way up: a chain that stopped before the edge of a tile of
        rows would leave free ones.
        """
        kind, costs, nodes = self.arms[arm].kind, prices.costs, len(prices.costs) - 1
        at = min(int(self._race(running).arms[arm].fed * running), nodes - 1)
        spans = np.minimum(_SPANS * max(1, running // 2), nodes - at)
        price = float(((costs[at + spans] - costs[at]) / spans).min())
        drafts = self._draft_costs[kind]
        if kind != "hybrid" and drafts.is_known:  # of a hybrid's tokens some cost nothing to draft
            price += drafts.line(running, max(at, running))[1]
        return min(_LOUDEST, max(_PRICED, self._rate(running, arm, prices.plain) * price))

    def _extend(self, prices: _Prices, running: int, nodes: int) -> None:
        prices.costs = self.step_costs.curve(running, np.arange(running, running + nodes + 1))
        prices.cost_list = prices.costs.tolist()

    # State

    def state_dict(self) -> dict[str, Any]:
        """Costs, and every regime's race."""
        return {
            "selector": "cost_aware",
            "version": _VERSION,
            "arms": _names(self.arms),
            "steps": self.step_costs.state_dict(),
            "drafts": {kind: costs.state_dict() for kind, costs in self._draft_costs.items()},
            "races": {str(key): race.state_dict() for key, race in self._races.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes `state_dict`'s; nothing if it is of another selector, version, drafter or draft length."""
        if state.get("selector") != "cost_aware" or state.get("version") != _VERSION:
            return
        if list(state["arms"]) != _names(self.arms):
            return
        self.step_costs.load_state_dict(state["steps"])
        for kind, costs in self._draft_costs.items():
            costs.load_state_dict(state["drafts"][kind])
        self._prices, self._races = {}, {}
        for key, saved in state["races"].items():
            race = self._races[int(key)] = self._new_race(int(key))
            race.load_state_dict(saved)


def _arms(kind: str, draft_len: int, topk: int) -> tuple[DraftStrategy, ...]:
    """Plain decoding; drafts by price; whole drafts of several lengths. Of a hybrid: both parts, and the trained one.

    The suffix part alone is not played: beside a trained drafter it never was the fastest (docs/log.md), and with an
    untrained one the hybrid's drafts are the suffix part's already.
    """
    every = sorted({min(length, draft_len) for length in (*_LENGTHS, draft_len)})
    lengths = {kind: every}
    if kind == "hybrid":
        lengths = {"hybrid": [draft_len], "eagle": sorted({min(2, draft_len), min(5, draft_len)})}
    priced = [DraftStrategy(kind, draft_len, topk, min_cumulative_acceptance=_PRICED) for kind in lengths]
    whole = [DraftStrategy(kind, length, topk) for kind in lengths for length in lengths[kind][::-1]]
    return (NO_DRAFT, *priced, *whole)


def _names(arms: tuple[DraftStrategy, ...]) -> list[str]:
    return [f"{arm.name} by price" if arm.min_cumulative_acceptance else arm.name for arm in arms]
