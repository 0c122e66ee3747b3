"""RL steps on a cluster: rollouts, waits, update, weight sync, one after another. Torch-free.

for each step: lengths -> a rollout of every replica -> waits, in which replicas pre-roll and train the drafter
               -> score, update, weight sync
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import partial

import numpy as np

from megatron_tlt.config.sim import SimConfig
from megatron_tlt.sim.cluster import Cluster
from megatron_tlt.sim.cost_model import build_costs
from megatron_tlt.sim.decisions import Decider
from megatron_tlt.sim.idle import Adaptation, IdleTime
from megatron_tlt.sim.pre_rollouts import SimPreRollouts
from megatron_tlt.sim.result import SIM_PHASES, Point, StepRecord
from megatron_tlt.sim.rollouts import Rollouts
from megatron_tlt.sim.trace import Lengths


class Simulation:
    """One configuration, one mode. `run` may be called once."""

    def __init__(self, config: SimConfig):
        self._config = config
        costs, self._cluster, self._lengths = build_costs(config), Cluster(config), Lengths(config)
        self._drafter = Adaptation(config)
        self._rollouts, decode_step = Rollouts(config, costs, self._cluster.replicas), 0.0
        most = self._rollouts.most(config.workload.prompts_per_step, config.rollout.samples_per_prompt)
        if config.idle.pre_rollout:
            decode_step = costs.step(most, most, most * self._lengths.of(0).mean() / 2, False)
        micro_step = self._cluster.micro_step() if config.idle.train_drafter else 0.0
        self._idle = IdleTime(config, micro_step, decode_step)
        self._decider = Decider(config, costs, most)
        self._pre_rollouts: SimPreRollouts | None = None
        if config.idle.pre_rollout:
            self._pre_rollouts = SimPreRollouts(config, self._lengths, self._rollouts)

    def run(self, mode: str) -> Point:
        """All steps; `mode` is the point's name."""
        steps = [self._step(step) for step in range(self._config.workload.steps)]
        mean = _mean(steps)
        return Point(mode, self._config.cluster.nodes, self._cluster.gpus, mean.seconds, mean, steps)

    def _step(self, step: int) -> StepRecord:
        cluster, training = self._cluster, self._config.training
        quality = self._drafter.quality
        table, ahead = self._decider.table(quality), self._pre_rollouts
        pre_rolled = None if ahead is None else ahead.take(step)
        rollouts = self._rollouts.run(self._lengths.of(step), table, pre_rolled)
        is_last = step + 1 == self._config.workload.steps
        waits = self._idle.waits(rollouts, None if ahead is None or is_last else partial(ahead.run, step, table))
        lengths = np.concatenate([r.lengths for r in rollouts])
        trained = lengths + self._config.workload.prompt_tokens
        phases = {
            "rollout": waits.done,
            "stop": waits.late + (0.0 if ahead is None else cluster.exchange(ahead.exchanged)),
            "score": 1e-3 * training.score_ms,
            "logprobs": cluster.logprobs(trained),
            "update": cluster.update(trained),
            "weight_sync": cluster.weight_sync(),
        }
        self._drafter.train(waits.micro_steps * training.micro_step_tokens)
        self._drafter.policy_moved()
        tp, over = self._config.rollout.tp, waits.done + waits.late
        return StepRecord(
            phases,
            int(lengths.sum()),
            0 if pre_rolled is None else int(pre_rolled.matching.sum()),
            float((over - waits.ends).sum()) * tp,
            float(waits.trains.sum()) * tp,
            float(waits.pre_rolls.sum()) * tp,
            quality,
            sum(r.preemptions for r in rollouts),
        )


def _mean(steps: Sequence[StepRecord]) -> StepRecord:
    """Field by field."""
    phases = {name: sum(step.phases[name] for step in steps) / len(steps) for name in SIM_PHASES}
    names = [field.name for field in fields(StepRecord) if field.name != "phases"]
    return StepRecord(phases, **{name: sum(getattr(step, name) for step in steps) / len(steps) for name in names})
