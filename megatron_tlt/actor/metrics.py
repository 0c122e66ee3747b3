"""Metric sums of micro-batches to metrics that every rank has."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from megatron_tlt.config.dims import Dims
from megatron_tlt.distributed.world import World

MAX_SUFFIX = "_max"


def merge(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Adds sums and takes maxima (names ending in `_max`), in the given order; names may be missing."""
    merged: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name not in merged:
                merged[name] = value
            else:
                merged[name] = max(merged[name], value) if name.endswith(MAX_SUFFIX) else merged[name] + value
    return merged


def reduce_over_world(parts: Iterable[Mapping[str, Tensor]], dims: Dims, world: World) -> dict[str, float]:
    """Merged metrics of all micro-batches of all replicas, on every rank. Collective.

    Only last stages have parts. Values are exchanged as Python floats, because a replica without sequences has no
    names, and added in the order of the replicas, which gives the same bits on every run.
    """
    local = merge(_on_host(part) for part in parts)
    gathered = world.all_gather_object(local)
    return merge(gathered[dims.rank_at(dp=replica, pp=dims.pp - 1)] for replica in range(dims.dp))


def _on_host(part: Mapping[str, Tensor]) -> dict[str, float]:
    """The sums of a micro-batch; the host waits for the device once."""
    if not part:
        return {}
    device = next(iter(part.values())).device
    stacked = torch.stack([value.to(device, torch.float64) for value in part.values()])
    return dict(zip(part, stacked.tolist(), strict=True))


def per_token(sums: Mapping[str, float]) -> dict[str, float]:
    """Sums divided by the number of tokens; maxima and counts as they are."""
    tokens = sums.get("tokens", 0.0)
    kept = {"tokens", "micro_batches"}
    return {
        name: value if name in kept or name.endswith(MAX_SUFFIX) else (value / tokens if tokens else math.nan)
        for name, value in sums.items()
    }
