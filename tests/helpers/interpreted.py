"""For tests of Triton's kernels, in its interpreter (tests/conftest.py) or on a GPU: values, and products one row at a
time, of bf16 as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, power: float = 0.0) -> torch.Tensor:
    """Normal values on `DEVICE`, divided by the last dimension to the `power`."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * shape[-1] ** -power
    return made.to(DEVICE, dtype)


def _wide(handle: TensorHandle) -> np.ndarray:
    """float32 values; the interpreter keeps bf16 as its 16 bits."""
    if handle.dtype.name == "bf16":
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)


@contextmanager
def products_by_rows() -> Iterator[None]:
    """The interpreter hands a tile to BLAS, which rounds a row by its place in it (a GPU's instruction does not), and
    multiplies the bits of bf16 as integers. Here every row is a product of its own, of exact float32 values. On a GPU
    nothing changes.
    """

    def dot(self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: Any) -> TensorHandle:
        left, right = _wide(a), _wide(b)
        rows = np.zeros(d.data.shape, np.float32)
        some = left.any(1) | (not np.isfinite(right).all())  # most rows of a small test's tile are padding: zeros
        rows[some] = np.matmul(left[some][:, None], right)[:, 0]
        return TensorHandle((rows + d.data).astype(d.data.dtype), d.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(InterpreterBuilder, "create_dot", dot)
        yield
