"""A tensor-parallel group whose ranks are threads of one process."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_tlt.distributed.tensor_parallel import TensorParallel

T = TypeVar("T")


class ThreadRank(TensorParallel):
    """One rank."""

    def __init__(self, rank: int, shared: list[Any], barrier: threading.Barrier):
        self.rank, self.size, self._shared, self._barrier = rank, len(shared), shared, barrier

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[...] to [size, ...]."""
        self._shared[self.rank] = tensor.clone()
        self._barrier.wait()
        gathered = torch.stack(self._shared)
        self._barrier.wait()
        return gathered

    def all_reduce(self, tensor: Tensor, in_order: bool = False) -> None:
        """Sums in place."""
        tensor.copy_(self.all_gather(tensor).sum(0))

    def broadcast(self, tensor: Tensor) -> None:
        """The first rank's values, in place."""
        tensor.copy_(self.all_gather(tensor)[0])

    def broadcast_object(self, value: T, source: int = 0) -> T:
        return self.all_gather_object(value)[source]

    def all_gather_object(self, value: T) -> list[T]:
        """Every rank's value, pickled."""
        self._shared[self.rank] = pickle.dumps(value)
        self._barrier.wait()
        found = [pickle.loads(of_rank) for of_rank in self._shared]
        self._barrier.wait()
        return found

    def wait_for_all(self) -> None:
        self._barrier.wait()


def on_ranks(size: int, work: Callable[[ThreadRank], T]) -> list[T]:
    """`work` on every rank of a group of `size` threads; what it returned, by rank."""
    shared: list[Any] = [None] * size
    barrier = threading.Barrier(size, timeout=60)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, [ThreadRank(r, shared, barrier) for r in range(size)]))
