"""One replica, token by token: the production scheduler and selector under a virtual clock.

    schedule -> select, draft -> (virtual seconds) -> record -> commit       as `rollout.engine.Engine`

Nothing is approximated but costs and acceptance: every block, chunk of a prompt, preemption and decision is made by
production code.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_tlt.config.sim import SimConfig
from megatron_tlt.rollout.batch import Batch, StepResult
from megatron_tlt.sim.cost_model import CostModel
from megatron_tlt.sim.rollouts import ReplicaRollout
from megatron_tlt.sim.scheduling import add_group, new_scheduler, plain_result, run_result
from megatron_tlt.sim.speculation import Speculation, StepCounts


class ExactReplica:
    """One engine through many rollouts: selector and scheduler keep their state, as in a run."""

    def __init__(self, config: SimConfig, costs: CostModel, seed: tuple[int, ...]):
        self._config, self._costs = config, costs
        self.speculation = Speculation(config, costs, seed)
        self._scheduler = new_scheduler(config, 1, config.rollout.max_running_requests)

    def run(self, groups: Sequence[np.ndarray]) -> ReplicaRollout:
        """Responses `groups` of samples, int [n] tokens each, one a prompt, in order of arrival."""
        scheduler, now, preempted = self._scheduler, 0.0, self._scheduler.num_preemptions
        self.speculation.counts = StepCounts()
        for index, lengths in enumerate(groups):
            add_group(scheduler, index, lengths, self._config.workload.prompt_tokens)
        generated, total = 0, sum(len(g) for g in groups)
        while not scheduler.is_idle:
            batch = scheduler.schedule()
            seconds, result = self._compute(batch)
            now += seconds
            generated += len(result.tokens)
            scheduler.commit(batch, result)
        lengths = np.sort(np.concatenate(groups))
        assert len(lengths) == total and generated == int(lengths.sum()), "every response has its length"
        return ReplicaRollout(now, lengths, scheduler.num_preemptions - preempted)

    def _compute(self, batch: Batch) -> tuple[float, StepResult]:
        """Virtual seconds of a step and its result."""
        rows, count = self._scheduler.rows, batch.num_decode
        cached = float(rows.context_lens[:count].sum())
        if not batch.is_decode:
            result = plain_result(batch.num_draws)
            if not count:
                return self._costs.prefill(batch.num_tokens), result
            return self._costs.step(count, batch.num_tokens, cached, False), result
        seconds, emitted = self.speculation.step(count, cached)
        left = rows.limit[:count] - rows.output_len[:count]
        room = self._scheduler.reserve(np.minimum(emitted, left).astype(np.int32) - 1)
        emitted = room.astype(np.int64) + 1  # not beyond a response's end, nor where its blocks end
        return seconds, run_result(emitted)
