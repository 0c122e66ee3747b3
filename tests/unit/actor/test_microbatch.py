"""Micro-batches: rows of products on CPUs."""

from __future__ import annotations

import numpy as np
import torch

from megatron_tlt.actor.microbatch import RowLayout, pack_micro_batches, row_multiple
from megatron_tlt.types import TrainSequence, Trajectory

CPU = torch.device("cpu")


def test_bf16_on_cpus_meets_few_numbers_of_rows():
    multiple = row_multiple(torch.bfloat16, CPU)
    assert multiple > 1 == row_multiple(torch.float32, CPU)
    trajectories = [Trajectory(i, 0, np.arange(n, dtype=np.int32), np.zeros(9)) for i, n in enumerate((40, 75, 30))]
    sequences = [TrainSequence.of(trajectory) for trajectory in trajectories]
    (packed,) = pack_micro_batches(sequences, 1000, RowLayout(CPU, "sbhd", row_multiple=multiple))
    assert packed.input_ids.shape == (1, 2 * multiple)  # 142 tokens feed
    assert packed.packing.starts == [0, 74, 113, 142, 2 * multiple]  # the padding is a sequence of its own
    assert len(packed.rows) == len(packed.labels) == 27
