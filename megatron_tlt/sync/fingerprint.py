"""A hash of all of a policy's weights: equal for equal bits, on any layout and number of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from megatron_tlt.sync.buckets import checksum

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_tlt.distributed.together import Ranks

_CHUNK = 1 << 22  # numbers summed at once on a device, in int64 five times: 160 MiB, which the plan does not count


class WeightFingerprint:
    """Hashes the tensors of a weight sync, which come in full to every rank. Ranks share the work: each sums some
    tensors."""

    def __init__(self, world: Ranks):
        self._world = world
        self._sums: list[tuple[str, int]] = []

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Passes the stream through, summing this rank's share of the tensors."""
        self._sums = []
        for number, (name, tensor) in enumerate(weights):
            if number % self._world.size == self._world.rank:
                self._sums.append((f"{name} {tensor.dtype} {tuple(tensor.shape)}", tensor_sum(tensor)))
            yield name, tensor

    def take(self) -> str:
        """SHA-256 of the last weight sync in hexadecimal, the same on every rank. Collective."""
        everything = sorted(entry for part in self._world.all_gather_object(self._sums) for entry in part)
        return hashlib.sha256(repr(everything).encode()).hexdigest()


def tensor_sum(tensor: Tensor) -> int:
    """A checksum of a tensor's bytes: CRC-32 on the CPU; on a device, where copying would take longer, `device_sum`."""
    if not tensor.is_cuda:
        return checksum(tensor)
    return device_sum(tensor.detach().contiguous().flatten().view(torch.uint8))


def device_sum(flat: Tensor) -> int:
    """Sum of `flat` uint8 [N], taken as 32-bit numbers where N allows, each times an odd number of its place; mod 2^64.

    A change of any single number shows, and so does any exchange of two different ones.
    """
    words = flat.view(torch.int32) if flat.numel() % 4 == 0 else flat
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start, start + part.numel(), device=flat.device)
        total += (part * (2 * places + 1)).sum()
    return int(total)
