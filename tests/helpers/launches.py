"""Launches of Triton kernels noted instead of run, so that host code may be tried on meta tensors of any size."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
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
