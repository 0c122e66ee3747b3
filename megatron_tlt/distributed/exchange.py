"""Moving Python values between ranks: each value goes to the ranks that need it, and only there."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_tlt.config.dims import Dims
    from megatron_tlt.distributed.together import Ranks
    from megatron_tlt.distributed.world import World

T = TypeVar("T")


def redistribute(world: World, items: Sequence[tuple[T, Sequence[int]]]) -> list[T]:
    """Sends every item to its destination ranks; returns what came for this rank, by source rank.

    Collective over the world. One all-to-all for the sizes and one for the bytes, so a rank's traffic is what
    it sends and receives and does not grow with the world, as an all-gather's would.
    """
    if world.size == 1:
        return [item for item, destinations in items for _ in destinations]
    outgoing: list[list[bytes]] = [[] for _ in range(world.size)]
    for item, destinations in items:
        pickled = pickle.dumps(item, protocol=5)  # once, however many ranks need it
        for rank in destinations:
            outgoing[rank].append(pickled)
    sent = [sum(map(len, batch)) for batch in outgoing]
    received = torch.empty(world.size, dtype=torch.int64)
    dist.all_to_all_single(received, torch.tensor(sent, dtype=torch.int64))
    sizes = received.tolist()
    inbox = torch.empty(sum(sizes), dtype=torch.uint8)
    outbox = inbox.new_empty(0)
    if sum(sent):
        outbox = torch.frombuffer(bytearray().join(chain.from_iterable(outgoing)), dtype=torch.uint8)
    del outgoing
    dist.all_to_all_single(inbox, outbox, output_split_sizes=sizes, input_split_sizes=sent)
    del outbox
    return list(_unpack(inbox))


def _unpack(inbox: Tensor) -> Iterator[Any]:
    """The values of pickles one behind the other, uint8 [bytes]."""
    stream = io.BytesIO(inbox.numpy())  # type: ignore[arg-type]
    while stream.tell() < len(inbox):
        yield pickle.load(stream)


def gather_columns(world: World, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Concatenates equally named columns of all ranks, by rank. Collective; meant for one row a sample."""
    parts = world.all_gather_object(columns)
    return {name: np.concatenate([part[name] for part in parts]) for name in columns}


def gather_large(world: Ranks, value: T | None) -> list[T]:
    """Values of the ranks that have one (not None), by rank; this rank's own is `value` itself. Collective.

    One broadcast a value, so a rank takes the sum of all values. An all-gather pads each one to the largest: where one
    rank has most of the bytes, that is the world's size times as much.
    """
    has_one = world.all_gather_object(value is not None)
    return [world.broadcast_object(value, rank) for rank, has in enumerate(has_one) if has]


def sum_over_replicas(world: World, dims: Dims, values: np.ndarray) -> np.ndarray:
    """Sum over data-parallel replicas, in rank order, so that it is the same bits on every rank. Collective."""
    parts = world.all_gather_object(values)
    firsts = [dims.replica_ranks(dp)[0] for dp in range(dims.dp)]
    return np.asarray(np.sum([parts[rank] for rank in firsts], axis=0, dtype=np.float64))
