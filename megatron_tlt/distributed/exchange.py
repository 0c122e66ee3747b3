"""Moving Python values between ranks: each value goes to the ranks that need it, and only there."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from megatron_tlt.config.dims import Dims
    from megatron_tlt.distributed.world import World

T = TypeVar("T")


def redistribute(world: World, items: Sequence[tuple[T, Sequence[int]]]) -> list[T]:
    """Sends every item to its destination ranks; returns what came for this rank, by source rank.

    Collective over the world. One all-to-all for the sizes and one for the bytes, so a rank's traffic is what
    it sends and receives and does not grow with the world, as an all-gather's would.
    """
    outgoing: list[list[T]] = [[] for _ in range(world.size)]
    for item, destinations in items:
        for rank in destinations:
            outgoing[rank].append(item)
    payloads = [pickle.dumps(batch, protocol=5) if batch else b"" for batch in outgoing]
    if world.size == 1:
        return pickle.loads(payloads[0]) if payloads[0] else []
    sent = [len(p) for p in payloads]
    received = torch.empty(world.size, dtype=torch.int64)
    dist.all_to_all_single(received, torch.tensor(sent, dtype=torch.int64))
    sizes = received.tolist()
    inbox = torch.empty(sum(sizes), dtype=torch.uint8)
    outbox = (
        torch.frombuffer(bytearray(b"".join(payloads)), dtype=torch.uint8)
        if sum(sent)
        else inbox.new_empty(0)
    )
    dist.all_to_all_single(inbox, outbox, output_split_sizes=sizes, input_split_sizes=sent)
    return _unpack(inbox.numpy().tobytes(), sizes)


def _unpack(data: bytes, sizes: Sequence[int]) -> list[Any]:
    items: list[Any] = []
    start = 0
    for size in sizes:
        if size:
            items.extend(pickle.loads(data[start : start + size]))
        start += size
    return items


def gather_columns(world: World, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Concatenates equally named columns of all ranks, by rank. Collective; meant for one row a sample."""
    parts = world.all_gather_object(columns)
    return {name: np.concatenate([part[name] for part in parts]) for name in columns}


def sum_over_replicas(world: World, dims: Dims, values: np.ndarray) -> np.ndarray:
    """Sum over data-parallel replicas, in rank order, so that it is the same bits on every rank. Collective."""
    parts = world.all_gather_object(values)
    firsts = [dims.replica_ranks(dp)[0] for dp in range(dims.dp)]
    return np.asarray(np.sum([parts[rank] for rank in firsts], axis=0, dtype=np.float64))
