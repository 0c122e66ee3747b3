"""Tensor parallelism as the rollout engine sees it: three collectives over one group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor


class TensorParallel(Protocol):
    """A rank's place in its tensor-parallel group. All ranks of the group call the same methods in one order."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums over the ranks, in place; returns `tensor`."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[..., N] of each rank to [..., size * N], concatenated along the last dimension by rank."""

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrites `tensor` with rank 0's; returns it."""


@dataclass(frozen=True)
class SingleRank:
    """No tensor parallelism: every collective is the identity."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Returns `tensor`."""
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Returns `tensor`."""
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Returns `tensor`."""
        return tensor


class GroupTensorParallel:
    """Collectives over a torch process group (gloo or NCCL)."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._first = dist.get_global_rank(group, 0)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums over the group, in place. The order of addition is the backend's."""
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[..., N] to [..., size * N]."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self._group)
        return torch.cat(parts, dim=-1)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The group's first rank's values, in place."""
        dist.broadcast(tensor, src=self._first, group=self._group)
        return tensor
