"""The production selector's choices and seconds at each number of running requests. Torch-free.

A selector's decisions depend on the number of running requests and on what it has measured. On one kind of GPU all
replicas measure the same, so one selector decides for all of them: it is run token by token (`speculation`), from many
requests down to one as in a rollout, first until it has tried its strategies and then for the mean of some steps.
Between these numbers of requests, and between context lengths, seconds are interpolated. Each table has a selector of
its own, which measures contexts that only grow, as in a rollout.

Legend: B running requests, K knots of B, X knots of context length.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import product

import numpy as np

from megatron_tlt.config.sim import SimConfig
from megatron_tlt.sim.cost_model import Roofline
from megatron_tlt.sim.speculation import Speculation, StepCounts

_SETTLE = 96  # engine steps at a knot until the selector has tried its strategies there
_MEASURED = 128  # engine steps that a rate is the mean of: some spans of the selector, its trials included
_MIXED = 24  # of either, where pre-rolled responses match: their choice tries no strategies
_QUALITIES = 4  # steps of the drafter's quality from 0 to 1 that have a table each
_CONTEXTS = 3  # context lengths
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the requests whose pre-rolled responses match; evenly spaced


def request_knots(most: int) -> np.ndarray:
    """Numbers of running requests for which rates are computed: 1, 2, 3, 4, then two an octave, and the largest."""
    knots = [1, 2, 3]
    size = 4
    while size < most:
        knots += [size, size * 3 // 2]
        size *= 2
    return np.unique(np.minimum([*knots, most], most))


@dataclass(frozen=True, slots=True)
class RateTable:
    """Seconds for each token of every running request, for every B up to the largest knot.

    S shares of the requests have a pre-rolled response that matches: `_SHARES`, or 0 alone. B = 0 is not used.
    """

    requests: np.ndarray  # int64 [K], ascending
    contexts: np.ndarray  # float64 [X], ascending
    rates: np.ndarray  # float64 [S, B + 1, X, 3]: see `at`

    def at(self, running: int, context: float, matching: float = 0.0) -> tuple[float, float, float]:
        """Of steps of `running` requests with a mean context of `context` tokens, `matching` of which match a
        pre-rolled response: seconds a token and tokens a step of the others, and tokens drafted for each of these.
        """
        top = len(self.contexts) - 1
        right, share = 0, 1.0
        if top:
            right = min(max(bisect_left(self.contexts, context), 1), top)
            low, high = self.contexts.item(right - 1), self.contexts.item(right)
            share = min(max((context - low) / (high - low), 0.0), 2.0)
        place = matching / running * (len(self.rates) - 1)
        row = int(place)
        rates = self.rates[row : row + 2, running]
        mixed = rates[:, right - 1] + share * (rates[:, right] - rates[:, right - 1])
        seconds, tokens, drafted = (mixed[0] + (place - row) * (mixed[-1] - mixed[0])).tolist()
        return seconds, tokens, drafted


class Decider:
    """Makes rate tables for one configuration, one for each quality of the drafter."""

    def __init__(self, config: SimConfig, costs: Roofline, most: int):
        """`most`: largest number of running requests of a replica."""
        self._config, self._costs = config, costs
        self._requests = request_knots(most)
        if config.plain_above is not None:  # nothing is interpolated across it
            edge = np.array([config.plain_above, config.plain_above + 1])
            self._requests = np.union1d(self._requests, edge[edge <= self._requests[-1]])
        first = config.workload.prompt_tokens
        last = first + config.rollout.max_tokens
        self._contexts = np.unique(np.geomspace(max(1, first + last // 16), last, _CONTEXTS))
        self._tables: dict[int, RateTable] = {}

    def table(self, quality: float) -> RateTable:
        """Rates at `quality`, rounded to one of some steps of it."""
        level = round(quality * _QUALITIES) if self._config.rollout.speculation.trained else 0
        table = self._tables.get(level)
        if table is None:
            table = self._tables[level] = self._make(level / _QUALITIES)
        return table

    def _make(self, quality: float) -> RateTable:
        mixed = _SHARES if self._config.idle.pre_rollout else _SHARES[:1]
        shape = len(mixed), len(self._requests), len(self._contexts)
        rates = np.zeros((*shape, 3))
        speculation = Speculation(self._config, self._costs, (self._config.workload.seed, 2))
        speculation.set_quality(quality)
        for x, k, s in product(range(shape[2]), range(shape[1])[::-1], range(shape[0])):
            running = int(self._requests[k])
            cached = running * float(self._contexts[x])
            matching = math.ceil(mixed[s] * running)
            counts = self._measure(speculation, running, cached, matching)
            # Without other requests, their tokens are taken to be those of the row before.
            tokens = counts.tokens / counts.row_steps if counts.row_steps else rates[s - 1, k, x, 1]
            drafted = counts.pre_rolled / counts.steps / max(1, matching)
            rates[s, k, x] = counts.seconds / counts.steps / tokens, tokens, drafted
        rates[0, ..., 2] = rates[min(1, len(mixed) - 1), ..., 2]  # of few as of more
        every = np.arange(int(self._requests[-1]) + 1)

        def spread(values: np.ndarray) -> np.ndarray:
            return np.interp(every, self._requests, values)

        return RateTable(self._requests, self._contexts, np.apply_along_axis(spread, 1, rates))

    def _measure(self, speculation: Speculation, running: int, cached: float, matching: int) -> StepCounts:
        """Means of some steps, after enough for the selector to have tried its strategies."""
        most = self._config.plain_above
        is_plain = self._config.rollout.speculation.drafter == "none" or (most is not None and running > most)
        settle, measured = (0, 1) if is_plain else (_SETTLE, _MEASURED)
        if matching:
            settle = measured = _MIXED
        for _ in range(settle):
            speculation.step(running, cached, matching)
        speculation.counts = StepCounts()
        for _ in range(measured):
            speculation.step(running, cached, matching)
        return speculation.counts
