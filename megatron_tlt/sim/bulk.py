"""One replica, from one change to the next: thousands of GPUs in seconds. Torch-free.

While the same requests run, a step costs the same but for growing contexts. So between two changes of the running
requests all tokens are drawn at once, at the rate that the production selector reached (`decisions`). Where every
request has a place from the start the production scheduler has nothing to decide, and the changes are the responses'
ends: the time is a sum over sorted lengths. Where requests wait for a place or memory runs short, the production
scheduler decides at each change, in quanta of some tokens.

    response 1  =========|                        B = 3, then 2, then 1:
    response 2  =================|                seconds = sum of (tokens until the next end) * rate(B, context)
    response 3  ============================|

Approximated: all running requests draw equally many tokens (in truth drafts are right more often for some), prompts
are computed before decoding begins, and a rate is the mean of some steps. `tests/unit/sim/test_bulk.py` holds it
against a replica that is simulated token by token. Legend: R requests of a replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_tlt.config.sim import SimConfig
from megatron_tlt.sim.cost_model import CostModel, cache_tokens
from megatron_tlt.sim.decisions import RateTable
from megatron_tlt.sim.scheduling import add_groups, new_scheduler, plain_result, run_result

_QUANTA = 512  # of tokens that the longest response is divided into between the scheduler's decisions


@dataclass(slots=True)
class ReplicaRollout:
    """Arrays by event, in order of time; the first is at 0."""

    times: np.ndarray  # float64 [E], seconds since the rollout began
    running: np.ndarray  # int64 [E], requests that decode or are to, from then on; the last is 0
    generated: np.ndarray  # float64 [E], tokens of all requests up to then
    lengths: np.ndarray  # int64 [R], ascending
    accept_length: float = 0.0
    preemptions: int = 0

    @property
    def seconds(self) -> float:
        """Until the last response's end; 0 without requests."""
        return float(self.times[-1]) if len(self.times) else 0.0


def empty() -> ReplicaRollout:
    """Of a replica that got no prompt."""
    none = np.zeros(1)
    return ReplicaRollout(none, np.zeros(1, np.int64), none, np.zeros(0, np.int64))


class BulkReplicas:
    """Rollouts of replicas that are alike."""

    def __init__(self, config: SimConfig, costs: CostModel):
        self._config, self._costs = config, costs
        self._room = cache_tokens(config)

    def run(self, groups: Sequence[np.ndarray], table: RateTable) -> ReplicaRollout:
        """Responses `groups` of samples, int [n] tokens each, one a prompt, in order of arrival."""
        if not groups:
            return empty()
        if self._have_places(groups):
            return self._side_by_side(groups, table)
        return self._scheduled(groups, table)

    def _have_places(self, groups: Sequence[np.ndarray]) -> bool:
        """Whether every request can run from the start to its end."""
        requests = sum(len(g) for g in groups)
        if requests > self._config.rollout.max_running_requests:
            return False
        if self._room is None:
            return True
        block = self._config.rollout.block_size
        tokens = sum(self._config.workload.prompt_tokens + int(g.sum()) + 2 * block * len(g) for g in groups)
        return tokens <= self._room

    def _prefill(self, groups: int) -> float:
        """Seconds until the prompts are computed."""
        tokens, budget = (
            groups * self._config.workload.prompt_tokens,
            self._config.rollout.max_batched_tokens,
        )
        full, rest = divmod(tokens, budget)
        return full * self._costs.prefill(budget) + (self._costs.prefill(rest) if rest else 0.0)

    def _side_by_side(self, groups: Sequence[np.ndarray], table: RateTable) -> ReplicaRollout:
        lengths = np.sort(np.concatenate(groups))
        count = len(lengths)
        running = np.arange(count, 0, -1)
        # The first token of each response comes with its prompt.
        ends = lengths.astype(np.float64)
        begins = np.concatenate(([1.0], ends[:-1]))
        tokens = np.maximum(ends - begins, 0.0)
        context = self._config.workload.prompt_tokens + (begins + ends) / 2
        spans = tokens * table.at(running, context)
        times = self._prefill(len(groups)) + np.concatenate(([0.0], np.cumsum(spans)))
        made = np.concatenate(([float(count)], count + np.cumsum(tokens * running)))
        return ReplicaRollout(
            np.concatenate(([0.0], times)),
            np.concatenate(([count], running, [0])),
            np.concatenate(([0.0], made)),
            lengths,
            _accept_length(table, running, tokens * running),
        )

    def _scheduled(self, groups: Sequence[np.ndarray], table: RateTable) -> ReplicaRollout:
        """The production scheduler in quanta of tokens, a step from one change to the next."""
        quantum = quantum_of(self._config.rollout.max_tokens)
        scheduler, prompt = new_scheduler(self._config, quantum), self._config.workload.prompt_tokens
        add_groups(scheduler, groups, prompt, quantum)
        now, generated = 0.0, 0.0
        events: list[tuple[float, int, float]] = []
        while not scheduler.is_idle:
            batch = scheduler.schedule()
            count, live = batch.num_decode, scheduler.num_running + scheduler.num_waiting
            rows, advance = scheduler.rows, 0
            seconds = 0.0
            if count:
                advance = 1
                if batch.is_decode:
                    advance = int((rows.limit[:count] - rows.output_len[:count]).min())
                    fits = scheduler.reserve(np.full(count, advance - 1, np.int32))
                    advance = int(fits.min()) + 1
                context = quantum * (float(rows.context_lens[:count].mean()) + advance / 2)
                seconds = advance * quantum * float(table.at(np.array(count), np.array(context)))
            if batch.is_decode:
                result = run_result(np.full(count, advance))
            else:
                result = plain_result(batch.num_draws)
                seconds += self._costs.prefill(quantum * (batch.num_tokens - count))
            events.append((now, live, generated))
            now += seconds
            generated += quantum * len(result.tokens)
            scheduler.commit(batch, result)
        events.append((now, 0, generated))
        times, running, made = (np.array(column) for column in zip(*events, strict=True))
        lengths = np.sort(np.concatenate(groups))
        made = made * (float(lengths.sum()) / made[-1])  # quanta are rounded up
        busy = np.minimum(running[:-1], self._config.rollout.max_running_requests)
        return ReplicaRollout(
            times,
            running,
            made,
            lengths,
            _accept_length(table, busy, np.diff(made)),
            scheduler.num_preemptions,
        )


def quantum_of(max_tokens: int) -> int:
    """Tokens of a quantum in which the scheduler counts."""
    return max(1, max_tokens // _QUANTA)


def _accept_length(table: RateTable, running: np.ndarray, tokens: np.ndarray) -> float:
    """Mean over the engine steps that drafted; `tokens` were emitted at each of `running`."""
    running = np.minimum(running, len(table.accept_length) - 1)
    accepted = table.accept_length[running]
    drafted = tokens * (accepted > 0) * table.speculating[running]
    rows = float((drafted[accepted > 0] / accepted[accepted > 0]).sum())
    return float(drafted.sum()) / rows if rows else 0.0
