"""Metric sums of micro-batches."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_tlt.actor.metrics import per_token, reduce_over_world
from megatron_tlt.config.dims import Dims


class Waits(TorchFunctionMode):
    """Counts what would wait for a GPU."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func in (Tensor.tolist, Tensor.item, Tensor.cpu, Tensor.__float__)
        return func(*args, **(kwargs or {}))


def test_the_host_waits_once_for_a_micro_batch() -> None:
    figures = [(0.1, 3, 2.5), (0.2, 4, 1.5)]
    names = ("loss", "tokens", "ratio_max")
    parts = [dict(zip(names, map(torch.tensor, values), strict=True)) for values in figures]
    with Waits() as waits:
        found = reduce_over_world(parts, Dims.fit(1, 1, 1, 1, 1), SimpleNamespace(all_gather_object=lambda v: [v]))
    first, second = (float(torch.tensor(values[0])) for values in figures)
    assert found == {"loss": first + second, "tokens": 7.0, "ratio_max": 2.5}
    assert per_token(found) == {"loss": found["loss"] / 7, "tokens": 7.0, "ratio_max": 2.5}
    assert waits.count == 2
