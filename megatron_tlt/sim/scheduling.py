"""The production scheduler for simulated requests, in quanta of some tokens. Torch-free."""

from __future__ import annotations

import numpy as np

from megatron_tlt.config.rollout import KV_BLOCK
from megatron_tlt.config.sim import SimConfig
from megatron_tlt.rollout.batch import Batch, StepResult
from megatron_tlt.rollout.block_manager import BlockManager
from megatron_tlt.rollout.request import Prefill, Request
from megatron_tlt.rollout.scheduler import Scheduler, SchedulerLimits
from megatron_tlt.sim.cost_model import cache_tokens
from megatron_tlt.types import SamplingParams


class QuantaScheduler(Scheduler):
    """The production scheduler, in steps in which a row may draw less than a quantum: nothing."""

    def commit(self, batch: Batch, result: StepResult) -> list[Request]:
        """Also returns the blocks that were opened for rows which drew nothing, too."""
        self._reserved = True
        return super().commit(batch, result)


def new_scheduler(config: SimConfig, quantum: int, rows: int) -> QuantaScheduler:
    """The scheduler of one replica that runs up to `rows` requests, in quanta of `quantum` tokens."""
    rollout, prompt = config.rollout, config.workload.prompt_tokens
    context = quanta(prompt, quantum) + quanta(rollout.max_tokens, quantum)
    # Where a quantum is more than a block, four of them are handed out at a time: it saves most of the work.
    block = 4 if quantum > KV_BLOCK else max(1, KV_BLOCK // quantum)
    room = cache_tokens(config)
    enough = rows * (-(-context // block) + 1)
    blocks = min(enough, max(room // (block * quantum), -(-context // block) + 1))
    # In quanta a decoding row would take a whole one of the budget of prompt tokens: it gets that back.
    budget = quanta(rollout.max_batched_tokens, quantum) + (rows if quantum > 1 else 0)
    return QuantaScheduler(SchedulerLimits(rows, budget, context, 1), BlockManager(blocks, block))


def quanta(tokens: int, quantum: int) -> int:
    """`tokens` in quanta of `quantum`, at least one."""
    return max(1, -(-tokens // quantum))


def add_group(scheduler: Scheduler, index: int, lengths: np.ndarray, prompt_tokens: int, quantum: int = 1) -> None:
    """Queues the samples of prompt `index`, int [n] tokens each; a response's length is its `max_tokens`."""
    prompt = np.zeros(quanta(prompt_tokens, quantum), np.int32)
    first = index * len(lengths)
    requests = [
        Request(prompt, SamplingParams(max_tokens=quanta(int(n), quantum)), index, i, first + i, frozenset())
        for i, n in enumerate(lengths)
    ]
    scheduler.add(Prefill(prompt, requests))


def plain_result(draws: int) -> StepResult:
    """One token for every row that draws."""
    return StepResult(np.zeros(draws, np.int32), np.zeros(draws, np.float32))


def run_result(emitted: np.ndarray) -> StepResult:
    """`emitted` tokens for each row."""
    total = int(emitted.sum())
    return StepResult(np.zeros(total, np.int32), np.zeros(total, np.float32), emitted.astype(np.int32))
