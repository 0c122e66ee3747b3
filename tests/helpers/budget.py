"""What a forward would cost on a GPU, counted on meta tensors: launches, bytes written, waits for the device."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers.launches import Launch, noted_launches

_ALLOCATIONS = {"empty", "empty_like", "new_empty", "empty_strided"}
_VIEWS = {
    "view", "_unsafe_view", "expand", "select", "slice", "split", "split_with_sizes", "unbind", "t", "transpose",
    "permute", "unsqueeze", "squeeze", "as_strided", "detach", "alias", "narrow", "_reshape_alias", "lift_fresh",
}  # fmt: skip


class Cost(TorchDispatchMode):
    """Counts what is dispatched inside. Values of meta tensors do not exist, so a wait for one raises by itself."""

    def __init__(self) -> None:
        super().__init__()
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
        results = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_meta]
        if name in _VIEWS or not results:
            return out
        if name not in _ALLOCATIONS:
            self.operators.append(name)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        self.copies += any(not t.is_meta and t.ndim for t in given)
        self.written += sum(t.nbytes for t in results)
        return out


@contextmanager
def cost():
    with noted_launches() as kernels, Cost() as counted:
        counted.kernels = kernels
        yield counted
