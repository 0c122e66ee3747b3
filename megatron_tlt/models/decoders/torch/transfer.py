"""Copies between host and device that neither waits for: pinned memory, and a stream of its own for results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


def upload(values: np.ndarray, device: torch.device) -> Tensor:
    """A copy of `values` on `device`."""
    made = torch.from_numpy(values)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device, copy=True)


def indices(values: Sequence[int], device: torch.device) -> Tensor:
    """Int64 [len(values)] on `device`."""
    return upload(np.array(values, np.int64), device)


@dataclass(slots=True)
class HostCopy:
    """A tensor on its way to the host."""

    _tensor: Tensor
    _done: Any = None  # a CUDA event; None: the copy is complete

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._done is None or bool(self._done.query())

    def wait(self) -> Tensor:
        """The tensor on the host, when it is there."""
        if self._done is not None:
            self._done.synchronize()
        return self._tensor

    def wait_pageable(self) -> Tensor:
        """`wait`, into pageable memory: for tensors that live long, so that the next copies reuse the pinned block."""
        tensor = self.wait()
        return tensor if self._done is None else tensor.clone()


class HostCopies:
    """Copies from one device to the host. On CUDA they run beside the device's other work, into pinned memory."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, tensor: Tensor) -> HostCopy:
        """Begins to copy `tensor`, which no later kernel writes; later kernels do not wait for the copy."""
        if self._stream is None:
            return HostCopy(tensor.cpu())
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        host = pinned_like(tensor)
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        tensor.record_stream(self._stream)  # its memory is not given to others before the copy is done
        return HostCopy(host, done)


def pinned_like(tensor: Tensor) -> Tensor:
    """Uninitialised pinned host memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
