"""Rows after steps of any number of tokens: where the next one goes, what was drawn, whose the blocks are."""

from __future__ import annotations

import random

import numpy as np
import pytest

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


def check(scheduler: Scheduler) -> None:
    """The next token's slot is where its position lies in the row's own blocks, unless it opens a new one."""
    rows, size, held = scheduler.rows, scheduler.blocks.block_size, []
    for row, request in enumerate(rows.requests):
        position, table = int(rows.positions[row]), rows.block_tables[row, : rows.num_blocks[row]].tolist()
        held += table
        assert request.row == row and rows.context_lens[row] == position + 1
        assert position == len(request.prompt) + rows.output_len[row] - 1
        assert rows.token_ids[row] == rows.outputs[request.slot, rows.output_len[row] - 1]
        if position // size < len(table):
            assert rows.slot_mapping[row] == table[position // size] * size + position % size
        assert len(table) in (position // size, position // size + 1), "drafts' blocks are given back"
    assert len(set(held)) == len(held), "prompts are not shared here"


def run(seed: int, max_running: int, num_blocks: int) -> list[Request]:
    """A random run, checked after every step; the finished requests."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    scheduler = Scheduler(SchedulerLimits(max_running, 64, 100, V), BlockManager(num_blocks, 4))
    for i in range(12):
        params = SamplingParams(max_tokens=rng.randint(1, 40))
        stops = Word(7) if rng.random() < 0.3 else None
        prompt = numbers.integers(0, V, rng.randint(1, 20)).astype(np.int32)
        scheduler.add(Prefill(prompt, [Request(prompt, params, i, 0, i, frozenset({3}), stops)]))
    finished = []
    while not scheduler.is_idle:
        batch = scheduler.schedule()
        counts = None
        if batch.is_decode:
            rows, n = scheduler.rows, batch.num_decode
            left = rows.limit[:n] - rows.output_len[:n] - 1
            fits = scheduler.reserve(np.minimum(left, numbers.integers(0, 9, n)).astype(np.int32))
            assert (fits <= left).all() and fits.min() >= 0
            counts = numbers.integers(1, fits + 2).astype(np.int32)
        total = batch.num_draws if counts is None else int(counts.sum())
        drawn = numbers.integers(0, V, total).astype(np.int32)
        result = StepResult(drawn, numbers.random(total, np.float32), counts)
        if counts is not None:
            scheduler.truncate(result)
        finished += scheduler.commit(batch, result)
        check(scheduler)
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
    return finished


@pytest.mark.parametrize(("max_running", "num_blocks"), [(1, 60), (3, 60), (8, 120), (8, 26)])
def test_runs_of_tokens_keep_rows_and_blocks_in_order(max_running: int, num_blocks: int) -> None:
    reasons = set()
    for seed in range(4):
        finished = run(seed, max_running, num_blocks)
        assert len(finished) == 12
        assert all(len(r.output) == len(r.logprobs) <= r.params.max_tokens for r in finished)
        reasons |= {r.finish_reason for r in finished}
    assert reasons == {"stop", "length"}
