"""Bytes of tensors that are alive, without a device: operations on meta tensors, storage by storage."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MetaBytes(TorchDispatchMode):
    """Counts the storages that operations within the block make on `device`, until they are freed."""

    def __init__(self, device: str = "meta"):
        super().__init__()
        self.now = self.peak = 0
        self._device, self._known = device, set[int]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in self._tensors((args, kwargs)):  # made before the block
            self._note(tensor.untyped_storage(), 0)
        out = func(*args, **(kwargs or {}))
        for tensor in self._tensors(out):
            storage = tensor.untyped_storage()
            self._note(storage, storage.nbytes())
        return out

    def _tensors(self, values: Any) -> list[Tensor]:
        found = [t for t in tree_leaves(values) if isinstance(t, Tensor)]
        return [t for t in found if t.device.type == self._device]

    def _note(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key, size)  # its address may be used again

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

    def reset_peak(self) -> None:
        """From now on `peak` is that of what follows."""
        self.peak = self.now
