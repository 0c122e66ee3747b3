"""Ranges of row-major elements as boxes: together they are exactly the range, in its order."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_tlt.actor.optimizer_shards import boxes, state_read_in_place

# isort: split
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


class FusedAdam(torch.optim.Optimizer):
    """Transformer Engine's, as far as loading goes: every moment is made anew."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state |= {name: moment.clone() for name, moment in state.items()}


@pytest.mark.parametrize("shape", [(7,), (4, 5), (1, 6), (5, 1), (2, 3, 4)])
def test_boxes_are_the_range_in_its_order(shape: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(whole.numel() + 1), 2):
        parts = list(boxes(shape, start, stop))
        found = [
            whole[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))].flatten() for offset, size in parts
        ]
        assert torch.cat([torch.empty(0, dtype=torch.int64), *found]).tolist() == list(range(start, stop))
        assert len(parts) <= 2 * len(shape) - 1


def test_a_load_makes_no_second_copy_of_fused_adams_moments() -> None:
    weight, moment = torch.nn.Parameter(torch.ones(3)), torch.full((3,), 2.0)
    inner = FusedAdam([weight], {"lr": 1.0, "step": 0})
    inner.state[weight] = {"exp_avg": moment}
    part: Any = object.__new__(DistributedOptimizer)
    part.optimizer = inner
    saved = {"state": {0: inner.state[weight]}, "param_groups": [{"lr": 0.5, "step": 7, "params": [0]}]}
    with state_read_in_place(SimpleNamespace(chained_optimizers=[part])):
        inner.load_state_dict(saved)
    assert inner.state[weight]["exp_avg"] is moment
    assert (inner.param_groups[0]["lr"], inner.param_groups[0]["step"]) == (0.5, 7)
    assert inner.param_groups[0]["params"] == [weight]
    inner.load_state_dict(saved)
    assert inner.state[weight]["exp_avg"] is not moment, "its own again"
