"""Grouping a stream of tensors into buckets of bounded size."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from megatron_tlt.types import WeightBucket

if TYPE_CHECKING:
    from torch import Tensor


def fill_buckets(weights: Iterable[tuple[str, Tensor]], version: int, limit_bytes: int) -> Iterator[WeightBucket]:
    """Yields buckets of at most `limit_bytes`; a tensor larger than that is a bucket of its own.

    Tensors are taken from the stream one at a time, so no more than one bucket is held.
    """
    held: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        num_bytes = tensor.numel() * tensor.element_size()
        if held and size + num_bytes > limit_bytes:
            yield WeightBucket(version, held)
            held, size = [], 0
        held.append((name, tensor))
        size += num_bytes
    if held:
        yield WeightBucket(version, held)


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes (row-major), the same on every device."""
    flat = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8)
    return zlib.crc32(flat.numpy().data)
