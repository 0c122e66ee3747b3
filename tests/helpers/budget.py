"""What a step costs: launches, bytes written and waits of a GPU on meta tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction


@dataclass
class Launch:
    """One launch: its kernel (of either class), grid and arguments by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__


@contextmanager
def noted_launches() -> Iterator[list[Launch]]:
    launches: list[Launch] = []

    def note(self, *args, grid, warmup, **kwargs):
        named = dict(zip(self.arg_names, args, strict=False))
        launches.append(Launch(self, grid, named | kwargs))

    with pytest.MonkeyPatch.context() as patch:
        for kind in (InterpretedFunction, JITFunction):
            patch.setattr(kind, "run", note)
        yield launches


_ALLOCATIONS = {"empty", "empty_like", "new_empty", "empty_strided"}
_VIEWS = {
    "view", "_unsafe_view", "expand", "select", "slice", "split", "split_with_sizes", "unbind", "t", "transpose",
    "permute", "unsqueeze", "squeeze", "as_strided", "detach", "alias", "narrow", "_reshape_alias", "lift_fresh",
}  # fmt: skip


class Cost(TorchDispatchMode):
    """Counts what is dispatched inside on `device`. Values of meta tensors do not exist, so a wait for one raises by
    itself.
    """

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self.device = device
        self.operators: list[str] = []  # launched by PyTorch
        self.kernels: list[Launch] = []  # launched by Triton
        self.written = 0  # bytes of all results
        self.copies = 0  # from the host to the device

    @property
    def launches(self) -> int:
        return len(self.operators) + len(self.kernels)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:  # what inference mode passes whole
            out = function.decompose(*args, **(kwargs or {}))
        if out is not NotImplemented:
            return out
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        results = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.device.type == self.device]
        if name in _VIEWS or not results:
            return out
        if name not in _ALLOCATIONS:
            self.operators.append(name)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        self.copies += any(t.device.type != self.device and t.ndim for t in given)
        self.written += sum(t.nbytes for t in results)
        return out


@contextmanager
def cost(device: str = "meta"):
    with noted_launches() as kernels, Cost(device) as counted:
        counted.kernels = kernels
        yield counted
