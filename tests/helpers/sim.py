"""Simulations small enough for a test, and one replica, token by token: the production scheduler and selector under a
virtual clock.

    schedule -> select, draft -> (virtual seconds) -> record -> commit       as `rollout.engine.Engine`
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from megatron_tlt.config.load import build_config
from megatron_tlt.config.sim import SimConfig
from megatron_tlt.rollout.batch import Batch, StepResult
from megatron_tlt.sim import decisions
from megatron_tlt.sim.cost_model import Roofline
from megatron_tlt.sim.rollouts import ReplicaRollout
from megatron_tlt.sim.scheduling import add_group, new_scheduler, plain_result, run_result
from megatron_tlt.sim.speculation import Speculation, StepCounts

MODEL = {
    "family": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "num_layers": 28,
    "num_heads": 28,
    "num_kv_heads": 4,
    "head_dim": 128,
    "intermediate_size": 18944,
}


@pytest.fixture(autouse=True, scope="module")
def few_steps() -> Iterator[None]:
    """In modules that import it selectors are asked for a quarter of the steps, so rates are means of few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decisions, "_SETTLE", 32)
        patch.setattr(decisions, "_MEASURED", 32)
        yield


def sim_config(*overrides: str, **sections: Any) -> SimConfig:
    """A 7B model on one node of 8 H100, 32 prompts of 4 samples, responses of about 300 tokens; no pre-rollouts."""
    base: dict[str, Any] = {
        "model": MODEL,
        "workload": {"steps": 2, "prompts_per_step": 32, "lengths": {"median": 250, "sigma": 0.8}},
        "rollout": {"samples_per_prompt": 4, "max_tokens": 2048, "max_batched_tokens": 8192},
        "idle": {"pre_rollout": False},
    }
    return build_config(base | sections, overrides, SimConfig)


def groups_of(seed: int, prompts: int, samples: int, median: float = 150.0, most: int = 2048) -> list[np.ndarray]:
    """Response lengths of some prompts."""
    rng = np.random.default_rng(seed)
    drawn = np.exp(np.log(median) + 0.8 * rng.standard_normal((prompts, samples)))
    return list(np.clip(drawn.astype(int), 2, most))


def straight(ends: list[float], rate: float = 100.0, requests: int = 4) -> list[ReplicaRollout]:
    """Replicas whose requests all run, at `rate` tokens a second each, until `ends`."""
    made = []
    for end in ends:
        made.append(ReplicaRollout(end, np.full(requests, int(rate * end))))
    return made


class ExactReplica:
    """One engine through many rollouts: selector and scheduler keep their state, as in a run."""

    def __init__(self, config: SimConfig, costs: Roofline, seed: tuple[int, ...]):
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
