"""Few rows are handled one by one, many as arrays: both leave the same state behind, blocks included."""

from __future__ import annotations

import random

import numpy as np
import pytest

from megatron_tlt.rollout import rows as rows_module
from megatron_tlt.rollout import scheduler as scheduler_module
from megatron_tlt.rollout.batch import StepResult
from megatron_tlt.rollout.block_manager import BlockManager
from megatron_tlt.rollout.request import Prefill, Request
from megatron_tlt.rollout.scheduler import Scheduler, SchedulerLimits
from megatron_tlt.types import SamplingParams

V = 40


class Word:
    """Stop strings that are one token."""

    def __init__(self, token: int):
        self.token = token

    def push(self, token_id: int) -> bool:
        return token_id == self.token


def state(scheduler: Scheduler) -> tuple:
    rows = scheduler.rows
    count = rows.num_rows
    arrays = (
        rows.counters[:, :count],
        rows.token_ids[:count],
        rows.num_blocks[:count],
        rows.write_at[:count],
    )
    tables = [rows.block_tables[r, : rows.num_blocks[r]].tolist() for r in range(count)]
    order = [r.order for r in rows.requests]
    return [a.tolist() for a in arrays], tables, order, scheduler.blocks.num_free, scheduler.num_preemptions


def transcript(seed: int, max_running: int, num_blocks: int) -> tuple[list, list]:
    """States after every step of a random run, and the finished requests."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    scheduler = Scheduler(SchedulerLimits(max_running, 64, 100, V), BlockManager(num_blocks, 4))
    for i in range(12):
        params = SamplingParams(max_tokens=rng.randint(1, 40))
        stops = Word(7) if rng.random() < 0.3 else None
        prompt = numbers.integers(0, V, rng.randint(1, 20)).astype(np.int32)
        scheduler.add(Prefill(prompt, [Request(prompt, params, i, 0, i, frozenset({3}), stops)]))
    states, finished = [], []
    while not scheduler.is_idle:
        batch = scheduler.schedule()
        counts = None
        if batch.is_decode:
            rows, n = scheduler.rows, batch.num_decode
            left = rows.limit[:n] - rows.output_len[:n] - 1
            fits = scheduler.reserve(np.minimum(left, numbers.integers(0, 9, n)).astype(np.int32))
            states.append(fits.tolist())
            counts = numbers.integers(1, fits + 2).astype(np.int32)
        total = batch.num_draws if counts is None else int(counts.sum())
        drawn = numbers.integers(0, V, total).astype(np.int32)
        result = StepResult(drawn, numbers.random(total, np.float32), counts)
        if counts is not None:
            scheduler.truncate(result)
        finished += scheduler.commit(batch, result)
        states.append(state(scheduler))
    answers = [(r.order, r.output, r.logprobs, r.finish_reason) for r in finished]
    assert scheduler.blocks.num_used == 0
    return states, answers


@pytest.mark.parametrize(("max_running", "num_blocks"), [(1, 60), (3, 60), (8, 120), (8, 26)])
def test_one_by_one_equals_arrays(monkeypatch: pytest.MonkeyPatch, max_running: int, num_blocks: int) -> None:
    reasons = set()
    for seed in range(4):
        got = []
        for few in (0, 100):
            monkeypatch.setattr(rows_module, "FEW_ROWS", few)
            monkeypatch.setattr(scheduler_module, "FEW_ROWS", few)
            got.append(transcript(seed, max_running, num_blocks))
        assert got[0] == got[1]
        assert len(got[0][1]) == 12
        reasons |= {a[3] for a in got[0][1]}
    assert reasons == {"stop", "length"}
