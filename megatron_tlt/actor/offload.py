"""Optimizer state in host memory between updates (`actor.offload_optimizer`).

Moments and fp32 master weights are copied to the host and their memory on the device is freed; gradient buffers are
freed without a copy, for every update starts from zero. Only the storage is freed: tensors, and the views that
megatron's distributed optimizer keeps of them, stay the same objects, and come back with the same bits. Weights stay
on the device: scoring and weight syncs read them.

On CPU the state is in the host's memory already: gradient buffers are freed, and the other tensors move within it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_tlt.actor.compat import HAS_CUDA, cpu_as_cuda


class OptimizerOffload:
    """Moves the state of one policy's optimizer to the host and back. Not thread-safe."""

    def __init__(self, ddp: Any, optimizer: Any):
        """megatron's DDP wrapper, whose gradient buffers are freed, and its optimizer."""
        self._ddp, self._optimizer = ddp, optimizer
        # Device storage, its bytes on the host.
        self._host_copies: list[tuple[torch.UntypedStorage, Tensor]] | None = None

    def offload(self) -> None:
        """Frees the device's memory. A second call does nothing."""
        if self._host_copies is not None:
            return
        self._host_copies = []
        for storage in self._storages():
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=HAS_CUDA)
            host.copy_(_bytes_of(storage))
            storage.resize_(0)
            self._host_copies.append((storage, host))
        with cpu_as_cuda():
            self._ddp.offload_grad_buffers()

    def values_of(self, tensor: Tensor) -> Tensor:
        """Where the values of a tensor are to be read: itself, or its part of the host copy."""
        lies_in = tensor.untyped_storage()._cdata
        for storage, host in self._host_copies or ():
            if storage._cdata == lies_in:
                return host.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return tensor

    @contextmanager
    def on_device(self, gradients: bool = True) -> Iterator[None]:
        """The state, and the gradient buffers if they are needed, are on the device inside, and afterwards where they
        were.
        """
        was_offloaded = self._host_copies is not None
        self._restore()
        if was_offloaded and gradients:
            with cpu_as_cuda():
                self._ddp.restore_grad_buffers()
        try:
            yield
        finally:
            if was_offloaded:
                self.offload()

    def _restore(self) -> None:
        """Copies the state back to the device and frees the host's copies: the next ones take their memory."""
        for storage, host in self._host_copies or ():
            storage.resize_(host.numel())
            _bytes_of(storage).copy_(host)
        self._host_copies = None

    def _storages(self) -> list[torch.UntypedStorage]:
        """Of moments and master weights, each once; none that holds a weight, and no step counters."""
        taken = {_address(p) for p in self._ddp.module.parameters()}
        found = []
        for part in self._optimizer.chained_optimizers:
            inner = part.optimizer
            tensors = [p for group in inner.param_groups for p in group["params"]]
            tensors += [v for state in inner.state.values() for v in state.values() if isinstance(v, Tensor) and v.ndim]
            for tensor in tensors:
                if tensor.numel() and _address(tensor) not in taken:
                    taken.add(_address(tensor))
                    found.append(tensor.untyped_storage())
        return found


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload, no-any-return]
