"""Backlog: several plain steps told as one are what the steps told one by one would have been."""

import numpy as np
import torch

from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.spec.backlog import Backlog


def running(count):
    rows = RunningRows(8, 16, 4, 100)
    rows.slots[:count] = np.arange(count)[::-1]
    rows.positions[:count] = 10 * np.arange(count)
    return rows


def test_steps_come_out_row_by_row_with_the_positions_of_the_first():
    rows = running(3)
    backlog = Backlog(rows, 8)
    for step in range(2):
        tokens = np.array([1, 2, 3], np.int32) + 10 * step
        backlog.add(tokens, torch.from_numpy(tokens[:, None] * 0.5))
        rows.positions[:3] += 1  # the commit
    told = backlog.take()
    assert told.tokens.tolist() == [1, 11, 2, 12, 3, 13] and told.counts.tolist() == [2, 2, 2]
    assert told.hidden.flatten().tolist() == [0.5, 5.5, 1.0, 6.0, 1.5, 6.5]
    assert told.rows.positions.tolist() == [0, 10, 20] and told.rows.slots.tolist() == [2, 1, 0]
    assert told.rows.num_rows == 3 and len(backlog) == 0


def test_one_step_and_no_hidden_states():
    backlog = Backlog(running(2), 8)
    backlog.add(np.array([4, 5], np.int32), None)
    told = backlog.take()
    assert told.tokens.tolist() == [4, 5] and told.counts.tolist() == [1, 1] and told.hidden is None


def test_is_full_after_its_most_steps():
    backlog = Backlog(running(1), 3)
    assert [backlog.add(np.array([1], np.int32), None) for _ in range(3)] == [False, False, True]
    assert len(backlog) == 3
    backlog.take()
    assert not backlog.add(np.array([1], np.int32), None)
