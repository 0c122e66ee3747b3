"""One replica, token by token: the production scheduler and selector under a virtual clock. Torch-free.

    schedule -> select, draft, prune -> (virtual seconds) -> record -> commit       as `rollout.engine.Engine`

Nothing is approximated but costs and acceptance: every block, chunk of a prompt, preemption and decision is made by
production code. It costs about 0.1 ms an engine step, so it is for small workloads, and what `bulk` is tested against.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_tlt.config.sim import SimConfig
from megatron_tlt.rollout.batch import Batch, StepResult
from megatron_tlt.rollout.block_manager import BlockManager
from megatron_tlt.rollout.request import Prefill, Request
from megatron_tlt.rollout.scheduler import Scheduler, SchedulerLimits
from megatron_tlt.sim.clock import VirtualClock
from megatron_tlt.sim.cost_model import CostModel, cache_tokens
from megatron_tlt.sim.rollout import ReplicaRollout, empty
from megatron_tlt.sim.speculation import Speculation, Tally
from megatron_tlt.types import SamplingParams


class ExactReplica:
    """One engine through many rollouts: selector and scheduler keep their state, as in a run."""

    def __init__(self, config: SimConfig, costs: CostModel, seed: tuple[int, ...]):
        self._config, self._costs = config, costs
        self.speculation = Speculation(config, costs, seed)
        self._scheduler = new_scheduler(config, 1)

    def run(self, groups: Sequence[np.ndarray]) -> ReplicaRollout:
        """Answers `groups` of samples, int [n] tokens each, one a prompt, in order of arrival."""
        if not groups:
            return empty()
        scheduler, clock, preempted = self._scheduler, VirtualClock(), self._scheduler.num_preemptions
        self.speculation.tally = Tally()
        add_groups(scheduler, groups, self._config.workload.prompt_tokens)
        events: list[tuple[float, int, float, float, bool]] = []
        generated, drawn, total = 0, 0.0, sum(len(g) for g in groups)
        while not scheduler.is_idle:
            batch = scheduler.schedule()
            before = self.speculation.tally.draft_rows
            live = scheduler.num_running + scheduler.num_waiting
            seconds, result, emitted = self._compute(batch)
            speculates = self.speculation.tally.draft_rows > before
            events.append((clock.now(), live, drawn, generated, speculates))
            clock.advance(seconds)
            drawn += emitted / max(1, batch.num_decode) if batch.num_decode else 0.0
            generated += len(result.tokens)
            scheduler.commit(batch, result)
        events.append((clock.now(), 0, drawn, generated, False))
        times, running, drawns, made, drafts = (np.array(column) for column in zip(*events, strict=True))
        tally, lengths = self.speculation.tally, np.sort(np.concatenate(groups))
        assert len(lengths) == total and generated == int(lengths.sum()), "every answer has its length"
        return ReplicaRollout(
            times,
            running,
            drawns,
            made,
            drafts,
            lengths,
            tally.accept_length,
            tally.speculating,
            scheduler.num_preemptions - preempted,
        )

    def _compute(self, batch: Batch) -> tuple[float, StepResult, int]:
        """Virtual seconds of a step, its result and the tokens of its decoding rows."""
        rows, count = self._scheduler.rows, batch.num_decode
        cached = float(rows.context_lens[:count].sum())
        if not batch.is_decode:
            result = plain_result(batch.num_draws)
            if not count:
                return self._costs.prefill(batch.num_tokens), result, 0
            return self._costs.step(count, batch.num_tokens, cached, False), result, count
        left = (rows.limit[:count] - rows.output_len[:count]).astype(np.int64)
        seconds, emitted = self.speculation.step(count, cached, left, self._scheduler.reserve)
        return seconds, run_result(emitted), int(emitted.sum())


def new_scheduler(config: SimConfig, quantum: int) -> Scheduler:
    """The production scheduler of one replica, in units of `quantum` tokens."""
    rollout, prompt = config.rollout, config.workload.prompt_tokens
    context = units(prompt, quantum) + units(rollout.max_tokens, quantum)
    # Where a unit is more than a block, four of them are handed out at a time: it saves most of the work.
    block = 4 if quantum > rollout.block_size else max(1, rollout.block_size // quantum)
    room = cache_tokens(config)
    rows = rollout.max_running_requests
    enough = rows * (-(-context // block) + 1)
    blocks = enough if room is None else min(enough, max(room // (block * quantum), -(-context // block) + 1))
    # In units a decoding row would take a whole one of the budget of prompt tokens: it gets that back.
    budget = units(rollout.max_batched_tokens, quantum) + (rows if quantum > 1 else 0)
    return Scheduler(SchedulerLimits(rows, budget, context, 1), BlockManager(blocks, block))


def units(tokens: int, quantum: int) -> int:
    """`tokens` in units of `quantum`, at least one."""
    return max(1, -(-tokens // quantum))


def add_groups(
    scheduler: Scheduler, groups: Sequence[np.ndarray], prompt_tokens: int, quantum: int = 1
) -> None:
    """Queues the samples of each prompt; an answer's length is its `max_tokens`."""
    prompt = np.zeros(units(prompt_tokens, quantum), np.int32)
    order = 0
    for at, lengths in enumerate(groups):
        requests = [
            Request(
                prompt,
                SamplingParams(max_tokens=units(int(n), quantum)),
                at,
                i,
                order + i,
                frozenset(),
            )
            for i, n in enumerate(lengths)
        ]
        order += len(requests)
        scheduler.add(Prefill(prompt, requests))


def plain_result(draws: int) -> StepResult:
    """One token for every row that draws."""
    return StepResult(np.zeros(draws, np.int32), np.zeros(draws, np.float32))


def run_result(emitted: np.ndarray) -> StepResult:
    """`emitted` tokens for each row."""
    total = int(emitted.sum())
    return StepResult(np.zeros(total, np.int32), np.zeros(total, np.float32), emitted.astype(np.int32))
