"""`Ledger`: stands in for a GPU's allocator: tensors on the meta device, bytes counted as storages come and go.

What code asks of values comes back as ones, and large tensors of the host are on meta, too, and counted apart: so real
code runs with the shapes of a 70B model in milliseconds. Not counted: what the allocator rounds up and cannot use.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_LARGE = 1 << 24  # bytes of a tensor of the host that is not made for real
_VALUES: dict[Any, Any] = {
    Tensor.item: lambda t: torch.ones((), dtype=t.dtype).item(),
    Tensor.__float__: lambda t: 1.0,
    Tensor.__int__: lambda t: 1,
    Tensor.__bool__: lambda t: True,
    Tensor.__index__: lambda t: 1,
    Tensor.tolist: lambda t: torch.ones(t.shape, dtype=t.dtype).tolist(),
}


class LedgerError(RuntimeError):
    """More than the device has."""


class Ledger:
    """A device of `limit` bytes. Inside `with`, every allocation on meta is one of it, but for those of the host."""

    def __init__(self, limit: float, values: Mapping[tuple[int, ...], list[Any]] | None = None):
        """`values`: what `tolist` of a tensor of a shape gives, where ones would not do."""
        self.values = dict(values or {})
        self.limit, self.live, self.peak, self.host = int(limit), 0, 0, 0
        self.peaks: dict[str, int] = {}
        self._storages: dict[int, int] = {}  # _cdata -> bytes
        self._host: set[int] = set()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        resize, ledger = torch.UntypedStorage.resize_, self

        def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resize(storage, size)
            ledger.count(storage)
            return storage

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign]
        self._stack.callback(setattr, torch.UntypedStorage, "resize_", resize)
        self._stack.enter_context(_Values(self))
        self._stack.enter_context(_Allocations(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def phase(self, name: str) -> None:
        """From now on peaks are this phase's."""
        self.peak = self.live
        self.peaks[name] = max(self.peaks.get(name, 0), self.live)
        self._name = name

    def count(self, storage: torch.UntypedStorage, is_host: bool = False) -> None:
        """Counts a storage's present size. Raises LedgerError beyond the limit."""
        if storage.device.type != "meta":
            return
        key, size = storage._cdata, storage.nbytes()
        if key not in self._storages:
            self._storages[key] = 0
            if is_host:
                self._host.add(key)
            weakref.finalize(storage, self._free, key)
        grown = size - self._storages[key]
        self._storages[key] = size
        if key in self._host:
            self.host += grown
            return
        self.live += grown
        self.peak = max(self.peak, self.live)
        if self.peaks:
            self.peaks[self._name] = max(self.peaks[self._name], self.live)
        if self.live > self.limit:
            gib = self.live / 2**30
            raise LedgerError(f"{gib:.1f} GiB of {self.limit / 2**30:.1f}: out of memory for {size / 2**30:.1f} GiB")

    def _free(self, key: int) -> None:
        size = self._storages.pop(key)
        if key in self._host:
            self._host.discard(key)
            self.host -= size
        else:
            self.live -= size


class _Values(TorchFunctionMode):
    """Values of tensors on meta are ones."""

    def __init__(self, ledger: Ledger):
        super().__init__()
        self._ledger = ledger

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].device.type == "meta" and func in _VALUES:
            given = self._ledger.values.get(tuple(args[0].shape)) if func is Tensor.tolist else None
            return _VALUES[func](args[0]) if given is None else given
        return func(*args, **(kwargs or {}))


class _Allocations(TorchDispatchMode):
    def __init__(self, ledger: Ledger):
        super().__init__()
        self._ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        to_host = device is not None and torch.device(device).type == "cpu"
        is_host = to_host and any(isinstance(a, Tensor) and a.device.type == "meta" for a in args)
        if func is torch.ops.aten.empty.memory_format and (device is None or to_host):
            item = torch.empty((), dtype=kwargs.get("dtype")).element_size()
            is_host = torch.Size(args[0]).numel() * item > _LARGE
        if is_host:
            kwargs |= {"device": "meta", "pin_memory": False}
        if func is torch.ops.aten.copy_.default and args[0].device.type == "cpu" and args[1].device.type == "meta":
            return args[0]  # a small tensor of the host keeps its values
        if func is torch.ops.aten.nonzero.default and args[0].device.type == "meta":
            return torch.empty(args[0].numel(), args[0].ndim, dtype=torch.int64, device="meta")
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._ledger.count(tensor.untyped_storage(), is_host)
        return out
