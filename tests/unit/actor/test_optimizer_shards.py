"""Ranges of row-major elements as boxes: together they are exactly the range, in its order."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_tlt.actor.optimizer_shards import boxes


@pytest.mark.parametrize("shape", [(7,), (4, 5), (1, 6), (5, 1), (2, 3, 4)])
def test_boxes_are_the_range_in_its_order(shape: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(whole.numel() + 1), 2):
        parts = list(boxes(shape, start, stop))
        found = [
            whole[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))].flatten()
            for offset, size in parts
        ]
        assert torch.cat([torch.empty(0, dtype=torch.int64), *found]).tolist() == list(range(start, stop))
        assert len(parts) <= 2 * len(shape) - 1
