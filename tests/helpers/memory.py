"""Bytes of tensors, counted: on the meta device in place of a GPU's allocator, and by PyTorch's CPU allocator.

Values that code reads of tensors on meta are ones, and large tensors of the host are on meta, too, without being
counted: so real code runs with the shapes of a 70B model in milliseconds. The allocator's rounding is not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
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


class MetaMemory:
    """Inside `with`, every allocation on meta counts, but for those of the host."""

    def __init__(self) -> None:
        self.live = 0
        """Bytes now."""
        self.peak = 0
        """The most bytes since `reset_peak`."""
        self._sizes: dict[int, int] = {}  # of storages by their _cdata
        self._host: set[int] = set()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        resize, memory = torch.UntypedStorage.resize_, self

        def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resize(storage, size)
            memory.count(storage)
            return storage

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign]
        self._stack.callback(setattr, torch.UntypedStorage, "resize_", resize)
        self._stack.enter_context(_Values())
        self._stack.enter_context(_Allocations(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def reset_peak(self) -> None:
        """The peak begins anew."""
        self.peak = self.live

    def count(self, storage: torch.UntypedStorage, is_host: bool = False) -> None:
        """Counts a storage's present size."""
        if storage.device.type != "meta":
            return
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes:
            self._sizes[key] = 0
            if is_host:
                self._host.add(key)
            weakref.finalize(storage, self._free, key)
        grown = size - self._sizes[key]
        self._sizes[key] = size
        if key not in self._host:
            self.live += grown
            self.peak = max(self.peak, self.live)

    def _free(self, key: int) -> None:
        size = self._sizes.pop(key)
        if key in self._host:
            self._host.discard(key)
        else:
            self.live -= size


class _Values(TorchFunctionMode):
    """Values of tensors on meta are ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].device.type == "meta" and func in _VALUES:
            return _VALUES[func](args[0])
        return func(*args, **(kwargs or {}))


class _Allocations(TorchDispatchMode):
    def __init__(self, memory: MetaMemory):
        super().__init__()
        self._memory = memory

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
                self._memory.count(tensor.untyped_storage(), is_host)
        return out


@dataclass
class LiveBytes:
    """What one block took: bytes in use at its end and at its highest, both since its start."""

    end: int = 0
    peak: int = 0


@contextmanager
def live_bytes() -> Iterator[LiveBytes]:
    """Counts allocations inside the block, also those inside of operators and in backward."""
    counted = LiveBytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        torch.zeros(1)
        yield counted
    events = recorded.profiler.kineto_results.events()
    memory = [e for e in events if e.name() == "[memory]" and e.device_type() == DeviceType.CPU]
    for event in sorted(memory, key=lambda e: e.start_ns()):
        counted.end += event.nbytes()
        counted.peak = max(counted.peak, counted.end)
