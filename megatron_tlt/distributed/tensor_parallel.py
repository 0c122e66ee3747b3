"""Tensor parallelism as the rollout engine sees it: collectives over one group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from megatron_tlt.errors import BackendError

if TYPE_CHECKING:
    from torch import Tensor

_FAILED = 1 << 62  # and the number of a rank: in place of a result


class TensorParallel(Protocol):
    """A rank's place in its tensor-parallel group. All its ranks call the same methods in one order."""

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums over the ranks, in place, in an order that does not depend on the tensor's length."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[...] of each rank to [size, ...] on every rank."""

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrites `tensor` with rank 0's; returns it."""

    def alone(self) -> AbstractContextManager[None]:
        """While it is open, `all_reduce` and `all_gather` wait for no rank and leave any values: for a rehearsal."""


@dataclass
class SingleRank:
    """No tensor parallelism: every collective is the identity."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, tensor: Tensor) -> None:
        """Leaves `tensor` as it is."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[...] to [1, ...]."""
        return tensor.unsqueeze(0)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Returns `tensor`."""
        return tensor

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Changes nothing."""
        yield


class GroupTensorParallel:
    """Collectives over a torch process group (gloo or NCCL)."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._first = dist.get_global_rank(group, 0)
        self._is_alone = False

    @contextmanager
    def alone(self) -> Iterator[None]:
        """See `TensorParallel`. Allocations are those of the real collectives. Mutates."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums over the group, in place. On CPU in the order of the ranks, so that batching cannot show.

        Gloo's ring adds in an order that depends on where in the buffer an element lies; with two ranks there
        is only one order. NCCL keeps its own.
        """
        if self._is_alone:
            return
        if tensor.is_cuda or self.size <= 2:
            dist.all_reduce(tensor, group=self._group)
            return
        parts = self.all_gather(tensor)
        torch.add(parts[0], parts[1], out=tensor)
        for part in parts[2:]:
            tensor += part

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[...] to [size, ...]."""
        gathered = tensor.new_empty((self.size, *tensor.shape))
        if self._is_alone:
            return gathered
        if tensor.is_cuda:  # one kernel, which a graph may capture
            dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=self._group)
        else:
            dist.all_gather(list(gathered.unbind(0)), tensor.contiguous(), group=self._group)
        return gathered

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The group's first rank's values, in place."""
        dist.broadcast(tensor, src=self._first, group=self._group)
        return tensor


def agree_on(tp: TensorParallel, device: torch.device | str = "cpu") -> Callable[[int], int]:
    """A function that returns, on every rank of `tp`, the largest of the ranks' arguments. Its calls are collective.

    `device` is one that the group's backend can send from.
    """

    def agree(value: int) -> int:
        return int(tp.all_gather(torch.tensor([value], device=device)).max())

    return agree


def run_on_all(intent: str, call: Callable[[], int], rank: int, largest: Callable[[int], int]) -> int:
    """The largest of what `call()` returns on the ranks of a group, of which this is `rank`; `largest`: see `agree_on`.
    Collective, but for `call` itself.

    Where it raises on one rank all raise: that rank its own error, the others a BackendError that names a rank and
    `intent`. A device that fails altogether cannot send any more: its peers end by the watchdog.
    """
    try:
        value = call()
    except BaseException:
        largest(_FAILED + rank)
        raise
    found = largest(value)
    if found >= _FAILED:
        raise BackendError(f"rank {found - _FAILED} of this engine could not {intent}: see its error")
    return found
