"""RL steps on a cluster: rollouts, waits, update, weight sync, one after another. Torch-free.

for each step: lengths -> a rollout of every replica -> waits, in which replicas pre-roll and train the drafter
               -> score, update, merge, weight sync
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from megatron_tlt.config.sim import SimConfig
from megatron_tlt.sim.cluster import Cluster
from megatron_tlt.sim.cost_model import build_costs
from megatron_tlt.sim.decisions import Decider, shares
from megatron_tlt.sim.idle import Adaptation, IdleTime
from megatron_tlt.sim.pre_rollouts import SimPreRollouts
from megatron_tlt.sim.result import SIM_PHASES, Point, StepRecord, Strategy
from megatron_tlt.sim.rollouts import ReplicaRollout, Rollouts
from megatron_tlt.sim.trace import Lengths

_CURVE = 512  # points of the running-requests curve


class Simulation:
    """One configuration, one mode. `run` may be called once."""

    def __init__(self, config: SimConfig):
        self._config = config
        self._costs = build_costs(config)
        self._cluster = Cluster(config)
        self._lengths = Lengths(config)
        self._drafter = Adaptation(config)
        self._trains = config.idle.train_drafter and config.rollout.speculation.trained is not None
        prompts, replicas = config.workload.prompts_per_step, self._cluster.replicas
        most, decode_step = -(-prompts // replicas) * config.rollout.samples_per_prompt, 0.0
        if config.idle.pre_rollout:  # in full batches
            most = min(config.rollout.max_running_requests, prompts * config.rollout.samples_per_prompt)
            decode_step = self._costs.step(most, most, most * self._lengths.of(0).mean() / 2, False)
        micro_step = self._cluster.micro_step() if config.idle.train_drafter else 0.0
        self._idle = IdleTime(config, micro_step, decode_step)
        self._decider = Decider(config, self._costs, most)
        self._rollouts = Rollouts(config, self._costs, replicas)
        self._pre_rollouts: SimPreRollouts | None = None
        if config.idle.pre_rollout:
            self._pre_rollouts = SimPreRollouts(config, self._lengths, self._rollouts, replicas)

    def run(self, mode: str) -> Point:
        """All steps; `mode` is the point's name."""
        steps = self._config.workload.steps
        records = []
        for step in range(steps):
            record, rollouts = self._step(step)
            records.append(record)
        return self._point(mode, records, running_requests(rollouts))

    def _step(self, step: int) -> tuple[StepRecord, list[ReplicaRollout]]:
        cluster, training = self._cluster, self._config.training
        quality = self._drafter.quality
        table, ahead = self._decider.table(quality), self._pre_rollouts
        pre_rolled = None if ahead is None else ahead.take(step)
        rollouts = self._rollouts.run(self._lengths.of(step), table, pre_rolled)
        is_last = step + 1 == self._config.workload.steps
        waits = self._idle.waits(rollouts, None if ahead is None or is_last else partial(ahead.run, step, table))
        exchanged = 0 if ahead is None else ahead.exchanged
        lengths = np.concatenate([r.lengths for r in rollouts])
        tokens = int(lengths.sum())
        trained = lengths + self._config.workload.prompt_tokens
        phases = {
            "rollout": waits.done,
            "stop": waits.late + cluster.barrier() + cluster.exchange(exchanged),
            "score": 1e-3 * training.score_ms,
            "logprobs": cluster.logprobs(trained),
            "update": cluster.update(trained),
            "merge": 1e-3 * training.merge_ms if waits.micro_steps else 0.0,
            "weight_sync": cluster.weight_sync(),
            "other": 0.0,
        }
        if self._trains:
            self._drafter.train(waits.micro_steps * training.micro_step_tokens)
        self._drafter.policy_moved()
        tp, over = self._config.rollout.tp, waits.done + waits.late
        record = StepRecord(
            step + 1,
            sum(phases.values()),
            phases,
            tokens,
            _weighted([r.accept_length for r in rollouts], [float(r.lengths.sum()) for r in rollouts]),
            float((over - waits.ends).sum()) * tp,
            float(waits.trains.sum()) * tp,
            float(waits.pre_rolls.sum()) * tp,
            0.0 if pre_rolled is None else int(pre_rolled.matching.sum()) / tokens,
            waits.micro_steps,
            quality,
            sum(r.preemptions for r in rollouts),
        )
        return record, rollouts

    def _point(self, mode: str, records: list[StepRecord], running: list[tuple[float, int]]) -> Point:
        cluster = self._cluster
        steps = len(records)
        total = sum(r.seconds for r in records)
        return Point(
            mode,
            self._config.cluster.nodes,
            cluster.gpus,
            cluster.replicas,
            total / steps,
            {name: sum(r.phases[name] for r in records) / steps for name in SIM_PHASES},
            sum(r.tokens for r in records) / total,
            sum(r.idle_gpu_seconds for r in records) / 3600,
            sum(r.recovered_gpu_seconds for r in records) / 3600,
            sum(r.pre_rolling_gpu_seconds for r in records) / 3600,
            total * cluster.gpus / 3600,
            _weighted([r.accept_length for r in records], [float(r.tokens) for r in records]),
            sum(r.matching * r.tokens for r in records) / sum(r.tokens for r in records),
            records,
            running,
            self.strategies(),
        )

    def strategies(self) -> list[Strategy]:
        """The selector's choices and speed at each number of running requests, beside plain decoding's."""
        table = self._decider.table(self._drafter.quality)
        context = float(table.contexts[len(table.contexts) // 2])
        rows = []
        for running, counts in sorted(table.by_knot.items()):
            plain = running / self._costs.step(running, running, running * context, False)
            rows.append(
                Strategy(
                    running, shares(counts.steps), counts.tokens / counts.seconds, plain, counts.accept_length
                )
            )
        return rows


def running_requests(rollouts: Sequence[ReplicaRollout]) -> list[tuple[float, int]]:
    """The curve of all replicas: (seconds, running requests from then on)."""
    moments = np.unique(np.concatenate([r.times for r in rollouts]))
    if len(moments) > _CURVE:
        moments = moments[np.linspace(0, len(moments) - 1, _CURVE).astype(int)]
    running = np.zeros(len(moments), np.int64)
    for rollout in rollouts:
        running += rollout.running[np.searchsorted(rollout.times, moments, side="right") - 1]
    return list(zip(moments.tolist(), running.tolist(), strict=True))


def _weighted(values: Sequence[float], weights: Sequence[float]) -> float:
    """Mean of the values above 0 by their weights; 0 if there are none."""
    pairs = [(v, w) for v, w in zip(values, weights, strict=True) if v > 0]
    total = sum(w for _, w in pairs)
    return sum(v * w for v, w in pairs) / total if total else 0.0
