"""Tensor parallelism as the rollout engine sees it: collectives over one group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class TensorParallel:
    """A rank's place in its tensor-parallel group, whose ranks all call the same methods in one order.

    This one is of a group of one rank: every collective is the identity.
    """

    rank, size = 0, 1

    def all_reduce(self, tensor: Tensor, in_order: bool = False) -> None:
        """Sums over the ranks, in place. On CPU, and with `in_order`, in an order that does not depend on the tensor's
        length or an element's place in it.
        """

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[...] of each rank to [size, ...] on every rank."""
        return tensor.unsqueeze(0)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrites `tensor` with rank 0's; returns it."""
        return tensor

    def broadcast_object(self, value: T) -> T:
        """Rank 0's value, a small one, on every rank."""
        return value

    def largest(self, value: int) -> int:
        """The largest of the ranks' values, on every rank."""
        return value if self.size == 1 else int(self.all_gather(torch.tensor(value)).max())


class GroupTensorParallel(TensorParallel):
    """Collectives over a torch process group: gloo for tensors on CPU, NCCL for those on CUDA."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._first = dist.get_global_rank(group, 0)

    def all_reduce(self, tensor: Tensor, in_order: bool = False) -> None:
        """Sums over the group, in place. On CPU, and with `in_order`, in the order of the ranks: batching cannot show.

        Gloo's ring adds in an order that depends on an element's place in the buffer; with two ranks there
        is only one order. NCCL chooses one by the buffer's size.
        """
        if self.size <= 2 or (tensor.is_cuda and not in_order):
            dist.all_reduce(tensor, group=self._group)
            return
        parts = self.all_gather(tensor)
        torch.add(parts[0], parts[1], out=tensor)
        for part in parts[2:]:
            tensor += part

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[...] to [size, ...]."""
        gathered = tensor.new_empty((self.size, *tensor.shape))
        if tensor.is_cuda:  # one kernel, which a graph may capture
            dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=self._group)
        else:
            dist.all_gather(list(gathered.unbind(0)), tensor.contiguous(), group=self._group)
        return gathered

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The group's first rank's values, in place."""
        dist.broadcast(tensor, src=self._first, group=self._group)
        return tensor

    def broadcast_object(self, value: T) -> T:
        """The first rank's value, pickled."""
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=self._first, group=self._group)
        return box[0]  # type: ignore[no-any-return]
