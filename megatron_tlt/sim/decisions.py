"""The production selector's choices and seconds at each number of running requests. Torch-free.

A selector's decisions depend on the number of running requests and on what it has measured. On one kind of GPU all
replicas measure the same, so one selector decides for all of them: it is run token by token (`speculation`), from many
requests down to one as in a rollout, first until it has tried its strategies and then for the mean of some steps.
Between these numbers of requests, and between context lengths, seconds are interpolated. Each table has a selector of
its own, which measures contexts that only grow, as in a rollout.

Legend: B running requests, K knots of B, X knots of context length.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from itertools import product

import numpy as np

from megatron_tlt.config.sim import SimConfig
from megatron_tlt.sim.cost_model import CostModel
from megatron_tlt.sim.speculation import Speculation, StepCounts

_SETTLE = 96  # engine steps at a knot until the selector has tried its strategies there
_MEASURED = 128  # engine steps that a rate is the mean of: some spans of the selector, its trials included
_QUALITIES = 4  # steps of the drafter's quality from 0 to 1 that have a table each
_CONTEXTS = 3  # context lengths


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
    """Seconds for each token of every running request, and the decisions, at the knots."""

    requests: np.ndarray  # int64 [K], ascending
    contexts: np.ndarray  # float64 [X], ascending
    seconds: np.ndarray  # float64 [B + 1, X] for every B up to the largest knot; row 0 is not used
    speculating: np.ndarray  # float64 [B + 1], share of the seconds with drafts
    accept_length: np.ndarray  # float64 [B + 1], of steps with drafts; 0: none
    by_knot: dict[int, StepCounts]  # steps, at the middle context

    def at(self, running: int, context: float) -> float:
        """Seconds for each token of `running` requests whose mean context is `context` tokens."""
        top = len(self.contexts) - 1
        if top == 0:
            return self.seconds.item(running, 0)
        right = min(max(bisect_left(self.contexts, context), 1), top)
        low, high = self.contexts.item(right - 1), self.contexts.item(right)
        share = min(max((context - low) / (high - low), 0.0), 2.0)
        near: float = self.seconds.item(running, right - 1)
        return near + share * (self.seconds.item(running, right) - near)


class Decider:
    """Makes rate tables for one configuration, one for each quality of the drafter."""

    def __init__(self, config: SimConfig, costs: CostModel, most: int):
        """`most`: largest number of running requests of a replica."""
        self._config, self._costs = config, costs
        self._requests = request_knots(min(most, config.rollout.max_running_requests))
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
        shape = len(self._requests), len(self._contexts)
        seconds = np.zeros(shape)
        speculating = np.zeros(shape[0])
        accepted = np.zeros(shape[0])
        by_knot: dict[int, StepCounts] = {}
        speculation = Speculation(self._config, self._costs, (self._config.workload.seed, 2))
        speculation.set_quality(quality)
        for x, k in product(range(shape[1]), range(shape[0])[::-1]):
            running = int(self._requests[k])
            counts = self._measure(speculation, running, running * float(self._contexts[x]))
            seconds[k, x] = counts.seconds * counts.row_steps / max(1, counts.tokens) / counts.steps.total()
            if x == shape[1] // 2:
                by_knot[running] = counts
                speculating[k], accepted[k] = counts.speculating, counts.accept_length
        every = np.arange(int(self._requests[-1]) + 1)

        def spread(values: np.ndarray) -> np.ndarray:
            return np.interp(every, self._requests, values)

        columns = np.stack([spread(column) for column in seconds.T], axis=1)
        return RateTable(
            self._requests, self._contexts, columns, spread(speculating), spread(accepted), by_knot
        )

    def _measure(self, speculation: Speculation, running: int, cached: float) -> StepCounts:
        """Means of some steps, after enough for the selector to have tried its strategies."""
        most = self._config.plain_above
        is_plain = self._config.rollout.speculation.drafter == "none" or (most is not None and running > most)
        for _ in range(0 if is_plain else _SETTLE):
            speculation.step(running, cached)
        speculation.counts = StepCounts()
        for _ in range(1 if is_plain else _MEASURED):
            speculation.step(running, cached)
        counts, speculation.counts = speculation.counts, StepCounts()
        return counts


def shares(steps: Counter[str]) -> dict[str, float]:
    """Counts as shares, the largest first."""
    return {name: count / steps.total() for name, count in steps.most_common()}
