"""Micro-batches: rows of products on CPUs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_tlt.actor.microbatch import RowLayout, pack_micro_batches, row_multiple
from megatron_tlt.types import TrainSequence, Trajectory
from tests.mpi.workers.actor_common import sequences

CPU = torch.device("cpu")


def test_bf16_on_cpus_meets_few_numbers_of_rows():
    multiple = row_multiple(torch.bfloat16, CPU)
    assert multiple > 1 == row_multiple(torch.float32, CPU)
    trajectories = [Trajectory(i, 0, np.arange(n, dtype=np.int32), np.zeros(9)) for i, n in enumerate((40, 75, 30))]
    three = [TrainSequence.of(trajectory) for trajectory in trajectories]
    (packed,) = pack_micro_batches(three, 1000, RowLayout(CPU, "sbhd", row_multiple=multiple))
    assert packed.input_ids.shape == (1, 2 * multiple)  # 142 tokens feed
    assert packed.packing.starts == [0, 74, 113, 142, 2 * multiple]  # the padding is a sequence of its own
    assert (len(packed.labels), len(packed.rows), int(packed.rows[27:].sum())) == (27, multiple, 0)


@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (2, 2)])
def test_so_does_each_rank_that_has_a_part_of_the_rows(tp: int, cp: int):
    rows = []
    for rank in range(cp):
        for part in pack_micro_batches(sequences(12), 200, RowLayout(CPU, "sbhd", tp, cp, rank, 128)):
            assert part.input_ids.shape[1] % 128 == len(part.rows) % 128 == 0
            assert int(part.rows.max()) < part.input_ids.shape[1] and not part.rows[len(part.own) :].any()
            rows.append(len(part.own))
    assert sum(rows) == sum(len(s.loss_mask) for s in sequences(12))
