"""Drafts as long as they pay, request by request, and not at all where they do not. Torch-free, no clock of its own.

Everything is weighed at one exchange rate: tokens per second that this engine achieves with so many requests. A
drafted token is worth its survival, in tokens; it costs a policy row, and a drafter row before that. While it is
being drafted both lie ahead (`DraftStrategy.min_survival`); once it is drafted only the policy row does (`admit`).
Source of the greedy admission: DSpark, Algorithm 1; why a rate and not a ratio a step: `admission.best_of_all`.

    select --(drafts?)--> propose --> admit --> verify --> observe --+
      ^  plain, or drafts down to which survival                     |  costs, gain of drafting, whose turn is next
      +--------------------------------------------------------------+

Legend: B running rows (requests), N drafted nodes, T = B + N rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from megatron_tlt.rollout.spec.admission import best_of_all, best_of_chain
from megatron_tlt.rollout.spec.costs import DraftCosts, StepCosts
from megatron_tlt.types import NO_DRAFT, DraftStrategy

_MEASURE = 5  # plain steps before the first draft in a regime
# Steps with drafts between two looks at plain ones, which drafts are compared with: at first few, then up to eight
# times as many the clearer drafting wins.
_SOON, _PLAIN_EVERY = 8, 96
_LOOK = 2  # plain steps in a row; the first, whose data drafting threw out of the caches, does not count
_REST = 15  # plain steps between two measured ones, where plain decoding has been measured often and drafting is off
_BUDGET = 0.0075  # of the time may go to finding out whether drafting pays again
_WORST = 20.0  # plain steps that a trial's price and the purse stay within: a debt beyond is forgiven
_PATIENCE = (128, 4096)  # plain steps between trials of a regime: doubles with every failure
_MARGIN = 0.99  # drafting goes on while its gain may well be above
_SLOW, _QUICK = (1024.0, 64.0), (64.0, 8.0)  # memories: request-steps, and steps at least
_TRIAL = (8, 24)  # steps with drafts, and request-steps, before they may be judged
_PROBE = (
    0.5  # share of a trial that explores: prices are guesses, and guesses that are too high would stay so
)
_BOLD = 0.5  # what is asked of a drafted token then, in shares of what it would have to promise
_PROBE_LENGTH = 4  # shortest drafts then: shorter ones hardly pay for their call
# Request-steps with drafts, in 12 steps at most, that nothing is concluded from: prices are guesses.
_BURN_IN = 160
_SPANS = np.arange(1, 9)  # rows ahead, in half batches, that a row's price is looked for in
_LOUDEST = 0.95  # largest survival ever asked for: some drafts must come, or nothing would be learned of them
_FRESH = 96  # uses of a rate and a least survival before they are made anew, sooner at first


@dataclass(slots=True)
class Tally:
    """Fading sums over steps with drafts. `worth`: seconds in which plain decoding emits what they emitted."""

    worth: float = 0.0
    spent: float = 0.0  # seconds
    rows: float = 0.0  # request-steps

    @property
    def gain(self) -> float:
        """Tokens per second with drafts over those without; 1 if unknown."""
        return self.worth / self.spent if self.spent > 0 else 1.0

    def add(self, worth: float, spent: float, running: int, memory: tuple[float, float]) -> None:
        """One more step of `running` requests. Mutates the sums."""
        keep = 1.0 - min(running / memory[0], 1 / memory[1])
        self.worth = self.worth * keep + worth
        self.spent = self.spent * keep + spent
        self.rows = self.rows * keep + running

    def may_pay(self, luck: float) -> bool:
        """Whether the true gain may reach `_MARGIN`; `luck` is how much a request's tokens of one step may mislead."""
        return self.gain * (1.0 + luck / math.sqrt(self.rows)) >= _MARGIN

    def fade(self, rows: float) -> None:
        """Shrinks to the weight of `rows` request-steps at most. Mutates the sums."""
        if self.rows > rows:
            self.worth, self.spent, self.rows = (
                x * rows / self.rows for x in (self.worth, self.spent, self.rows)
            )


@dataclass(slots=True)
class Regime:
    """What is known of speculation with about so many running requests (buckets double)."""

    plain_steps: int = 0
    since_plain: int = 0
    look: int = 0  # plain steps still to come before drafting goes on
    slow: Tally = field(default_factory=Tally)
    quick: Tally = field(default_factory=Tally)  # sees at once that a drafter went bad
    extra: float = 0.0  # drafted tokens fed a request, running mean
    reach: float = 3.0  # longest draft that is any use; grows while all is admitted that was drafted
    is_on: bool = True  # drafting pays, as far as is known
    trial: int = _TRIAL[0]  # steps with drafts still to come before judgement
    probe: int = _TRIAL[0] // 2  # those of them that explore
    waited: int = 0  # plain steps since drafting was given up
    patience: int = _PATIENCE[0]

    def begin_trial(self, running: int) -> None:
        """A trial begins afresh: the last one may have failed by its own short drafts. Mutates the regime."""
        self.trial = _trial_steps(running)
        self.probe = round(_PROBE * self.trial)
        self.extra, self.reach = max(1.0, self.extra), max(3.0, self.reach)

    def may_pay(self) -> bool:
        """Whether neither memory tells that drafting loses: the slow one by a little, the quick one by much."""
        luck = 0.05 + 0.55 * math.sqrt(
            min(1.0, self.extra / 2)
        )  # deviation of a step's tokens from their mean
        return self.slow.may_pay(luck if self.slow.rows >= 64 else 2 * luck) and self.quick.may_pay(
            2.5 * luck
        )


class _Prices:
    """What `CostAware` needs at one batch size, kept until costs or gains have moved."""

    __slots__ = ("age", "cost_list", "costs", "draft", "plain", "rate", "strategy", "token", "version")

    def __init__(self) -> None:
        self.age, self.version = 0, -1
        self.costs, self.cost_list = np.zeros(0), [0.0]
        self.plain = self.rate = 0.0
        self.draft = self.token = 0.0  # seconds of a draft call, and of each token; 0 until one was seen
        self.strategy = NO_DRAFT


class CostAware:
    """Per-request draft lengths by global greedy admission; plain decoding where speculation loses.

    Nothing here is a constant of a machine: costs of steps and drafts are measured, and so is the gain in each regime
    of running requests. A losing drafter is tried again for `_BUDGET` of the time.
    """

    def __init__(self, kind: str, draft_len: int, topk: int = 1, overhead_seconds: float = 0.0):
        """`overhead_seconds`: of a step with drafts, beyond what `observe` is told, compared with a plain one."""
        self.kind, self._draft_len, self._topk = kind, draft_len, topk
        self._overhead = overhead_seconds
        self.step_costs, self.draft_costs = StepCosts(), DraftCosts(kind)
        self._regimes: dict[int, Regime] = {}
        self._prices: dict[int, _Prices] = {}
        self._drafted = 0  # tokens in the trunks of the present step's draft
        self._burn_in = _BURN_IN
        self._purse = 0.0  # seconds that may be lost to trials
        self._debt = 0.0  # tokens decoded without the drafter, which it has to catch up with
        self._catch_up: float | None = None  # seconds for each of them
        self._last_running = 0
        self._was_drafting = False

    # A step

    def select(self, running: int) -> DraftStrategy:
        """See `StrategySelector.select`. `min_survival` of the strategy is what a further token must promise."""
        regime = self._regimes.get(running.bit_length())
        if regime is None:
            regime = self._new_regime(running)
        self._drafted = 0
        if not regime.is_on or regime.look or regime.plain_steps < _MEASURE:
            return NO_DRAFT
        return self._priced(running, regime).strategy

    def rest(self, running: int) -> int:
        """See `StrategySelector.rest`."""
        regime = self._regimes[running.bit_length()]
        if regime.is_on or regime.plain_steps < 16 or regime.waited + _REST >= regime.patience:
            return 0
        regime.plain_steps += _REST
        regime.waited += _REST
        self._debt += _REST * running
        if running in self._prices:
            plain = self._prices[running].plain
            self._purse = min(_WORST * plain, self._purse + _BUDGET * _REST * plain)
        return _REST

    def rate(self, running: int) -> float:
        """See `StrategySelector.rate`."""
        prices = self._prices.get(running)
        return prices.rate if prices is not None else 0.0

    def admit(
        self,
        strategy: DraftStrategy,
        running: int,
        survival: np.ndarray,
        depths: np.ndarray,
        counts: np.ndarray,
        parents: np.ndarray | None,
    ) -> np.ndarray:
        """See `StrategySelector.admit`: the nodes whose survival is worth their rows at the present rate."""
        nodes = len(survival)
        regime = self._regimes[running.bit_length()]
        prices = self._priced(running, regime)  # another rank may have selected: nothing need be ready
        self._drafted = nodes // strategy.topk
        if len(prices.costs) <= nodes:
            self._extend(prices, running, nodes)
        rate = prices.rate * self._boldness(regime)
        if running == 1 and parents is None:
            deepest = best_of_chain(survival.tolist(), prices.cost_list, rate)
            _note_reach(regime, nodes, deepest, 1 / 8)
            chosen: np.ndarray = np.arange(nodes) < deepest
            return chosen
        keep = best_of_all(survival, prices.costs, rate)
        if prices.age % 4 == 0:
            _note_reach(regime, int(depths.max()), int((depths * keep).max()), 1 / 3)
        return keep

    def observe(
        self,
        strategy: DraftStrategy,
        running: int,
        rows_fed: int,
        emitted: np.ndarray,
        draft_seconds: float,
        step_seconds: float,
    ) -> None:
        """See `StrategySelector.observe`."""
        regime = self._regimes.get(running.bit_length())
        if regime is None:
            regime = self._new_regime(running)
        if running < self._last_running:
            self._debt *= running / self._last_running  # who left owes nothing, and neither do newcomers
        self._last_running = running
        if strategy.kind == "none":
            self._observe_plain(regime, running, step_seconds)
            return
        self.step_costs.observe(running, rows_fed, step_seconds)
        tokens = int(emitted[0]) if running == 1 else int(emitted.sum())
        self._observe_draft(regime, running, rows_fed, tokens, draft_seconds, step_seconds)

    def _observe_plain(self, regime: Regime, running: int, seconds: float) -> None:
        steps = regime.plain_steps = regime.plain_steps + 1
        self._debt += running
        regime.waited += 1
        regime.look, regime.since_plain = max(0, regime.look - 1), 0
        was_drafting, self._was_drafting = self._was_drafting, False
        if was_drafting and self.step_costs.is_known:
            return
        self.step_costs.observe(running, running, seconds)
        plain = self._priced(running, regime).plain
        self._earn(plain, seconds)
        if regime.is_on:
            return
        enough = regime.waited >= regime.patience and steps >= _MEASURE
        if enough and self._purse >= self._trial_price(regime, running, plain):
            regime.is_on = True
            regime.begin_trial(running)
            for tally in (regime.slow, regime.quick):
                tally.fade(regime.trial * running / 4)  # what the trial shows outweighs what was

    def _earn(self, plain: float, seconds: float) -> None:
        """The purse fills with time, neither into a hoard of trials nor from a debt that would never be paid."""
        purse = self._purse + _BUDGET * min(seconds, 2 * plain)
        self._purse = max(-_WORST * plain, min(_WORST * plain, purse))

    def _trial_price(self, regime: Regime, running: int, plain: float) -> float:
        """Seconds that a trial is expected to lose: its drafts, and the drafter's catching up."""
        loss = max(0.01, 1.0 / max(regime.slow.gain, 0.2) - 1.0)
        price = _trial_steps(running) / _BOLD * loss * plain
        if self.draft_costs.is_known:
            catch_up = self._catch_up
            if catch_up is None:  # never seen: it is about what drafting as many tokens would cost
                catch_up = self._prices[running].token
            price += catch_up * self._debt
        return min(price, _WORST * plain)

    def _observe_draft(
        self, regime: Regime, running: int, rows_fed: int, tokens: int, draft: float, step: float
    ) -> None:
        prices = self._priced(running, regime)
        paid = self._steady_draft(prices, running, draft)
        usual = float(prices.costs[rows_fed - running])
        spent = min(1.25 * usual, max(0.8 * usual, step)) + paid + self._overhead
        worth = tokens * prices.plain / running
        regime.extra += ((rows_fed - running) / running - regime.extra) * max(min(running, 32) / 128, 1 / 16)
        regime.since_plain += 1
        self._was_drafting = True
        often = _PLAIN_EVERY * min(8.0, max(1.0, regime.slow.gain) ** 2)
        if regime.since_plain >= min(often, _SOON * 1.25 ** min(40, max(0, regime.plain_steps - _MEASURE))):
            regime.look = _LOOK
        self._earn(prices.plain, spent)
        if self._burn_in > 0 or regime.probe > 0:
            self._burn_in -= max(running, _BURN_IN // 12)
            regime.probe, regime.trial = regime.probe - 1, regime.trial - 1
            prices.age = 0
            return
        regime.slow.add(worth, spent, running, _SLOW)
        regime.quick.add(worth, spent, running, _QUICK)
        regime.trial -= 1
        if regime.slow.gain < 1.0:
            self._purse -= spent - worth + draft - paid
        if regime.trial <= 0 and not regime.may_pay():
            regime.is_on, regime.waited, regime.look = False, 0, 0
            regime.patience = min(_PATIENCE[1], 2 * regime.patience)
        elif regime.trial < -_PATIENCE[0]:
            regime.patience = _PATIENCE[0]

    def _steady_draft(self, prices: _Prices, running: int, seconds: float) -> float:
        """The draft's seconds, without what is not its own: mishaps, and catching up with undrafted tokens."""
        usual = prices.draft + prices.token * self._drafted
        if not usual:
            self.draft_costs.observe(running, self._drafted, seconds)
            prices.age = 0  # now its price is known
        elif self._debt:
            catch_up = max(0.0, seconds - usual) / self._debt
            self._catch_up = catch_up if self._catch_up is None else (self._catch_up + catch_up) / 2
            seconds = min(seconds, usual)
        else:
            self.draft_costs.observe(running, self._drafted, seconds)
            seconds = min(seconds, 2 * usual)
        self._debt = 0.0
        return seconds

    # Prices

    def _priced(self, running: int, regime: Regime) -> _Prices:
        """Costs and rate at this batch size, made anew every `_FRESH` steps or after a look at the costs."""
        prices = self._prices.get(running)
        if prices is None:
            prices = self._prices[running] = _Prices()
        prices.age -= 1
        if prices.age < 0:
            self._reprice(prices, running, regime)
        return prices

    def _reprice(self, prices: _Prices, running: int, regime: Regime) -> None:
        self.step_costs.refresh()
        if prices.version != self.step_costs.version:
            nodes = max(len(prices.costs) - 1, running * self._draft_len * self._topk)
            self._extend(prices, running, nodes)
        prices.version = self.step_costs.version
        prices.age = min(_FRESH, 4 + int(regime.slow.rows / (4 * running)))
        costs, nodes = prices.costs, len(prices.costs) - 1
        prices.plain = float(costs[0])
        prices.rate = max(1.0, regime.slow.gain) * running / prices.plain
        # A row's price where drafts end at present. On a stair, the price of the best way up: a chain that stops before
        # the edge of a tile of rows would leave free ones.
        at = min(int(regime.extra * running), nodes - 1)
        spans = np.minimum(_SPANS * max(1, running // 2), nodes - at)
        row = float(((costs[at + spans] - costs[at]) / spans).min())
        if self.draft_costs.is_known:
            prices.draft, prices.token = self.draft_costs.line(running, max(at, running))
        bold = self._boldness(regime)
        length = min(self._draft_len, max(1 if bold == 1.0 else _PROBE_LENGTH, round(regime.reach)))
        # Of a hybrid's tokens some cost nothing to draft: it knows itself which.
        token = prices.token if self.kind != "hybrid" else 0.0
        survival = min(_LOUDEST, bold * prices.rate * (row + token))
        prices.strategy = DraftStrategy(self.kind, length, self._topk, 0, survival)

    def _boldness(self, regime: Regime) -> float:
        return _BOLD if self._burn_in > 0 or regime.probe > 0 else 1.0

    def _extend(self, prices: _Prices, running: int, nodes: int) -> None:
        prices.costs = self.step_costs.curve(running, np.arange(running, running + nodes + 1))
        prices.cost_list = prices.costs[:65].tolist()

    def _new_regime(self, running: int) -> Regime:
        """A regime never seen starts from its nearest neighbour's rate, which weighs little, and with a trial."""
        key = running.bit_length()
        regime = Regime()
        near = min(
            (k for k, r in self._regimes.items() if r.slow.rows), key=lambda k: abs(k - key), default=None
        )
        if near is not None:
            other = self._regimes[near]
            regime.slow, regime.quick = replace(other.slow), replace(other.quick)
            regime.slow.fade(running)
            regime.quick.fade(running)
            regime.extra, regime.reach = other.extra, other.reach
        regime.begin_trial(running)
        self._regimes[key] = regime
        return regime

    # State

    def state_dict(self) -> dict[str, Any]:
        """Costs and regimes."""
        return {
            "selector": "cost_aware",
            "kind": self.kind,
            "steps": self.step_costs.state_dict(),
            "drafts": self.draft_costs.state_dict(),
            "catch_up": self._catch_up,
            "burn_in": self._burn_in,
            "purse": self._purse,
            "regimes": {str(key): asdict(regime) for key, regime in self._regimes.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes `state_dict`'s; nothing if it is of another selector or drafter."""
        if state.get("selector") != "cost_aware" or state["kind"] != self.kind:
            return
        self.step_costs.load_state_dict(state["steps"])
        self.draft_costs.load_state_dict(state["drafts"])
        self._catch_up, self._burn_in, self._purse = state["catch_up"], int(state["burn_in"]), state["purse"]
        self._debt, self._last_running, self._was_drafting = 0.0, 0, False
        self._prices, self._regimes = {}, {}
        for key, saved in state["regimes"].items():
            tallies = {name: Tally(**saved[name]) for name in ("slow", "quick")}
            self._regimes[int(key)] = Regime(**{**saved, **tallies})


def _trial_steps(running: int) -> int:
    return max(_TRIAL[0], _TRIAL[1] // running)


def _note_reach(regime: Regime, drafted: int, admitted: int, share: float) -> None:
    """Follows the depth that admission reaches, for drafters that do not stop by survival (block verification)."""
    if drafted > admitted + 1:
        regime.reach += (admitted + 1 - regime.reach) * share
    elif drafted <= admitted:
        regime.reach = max(regime.reach, drafted + 1.0)
