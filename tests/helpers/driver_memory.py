"""`FixedMemory` on the host: the real class over a stand-in for the driver, compiled against the real cuda.h."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import torch
import triton
from torch import Tensor

from megatron_tlt.models.decoders.native.build import find_compiler
from megatron_tlt.models.decoders.torch.fixed_memory import FixedMemory

DEVICE = torch.device("xla", 1)  # any second device that PyTorch does nothing with
_SOURCE = Path(__file__).with_suffix(".c")


def build_driver(folder: Path) -> ctypes.CDLL:
    """The stand-in, with `room` and `taken` in bytes."""
    compiler = find_compiler()
    assert compiler is not None
    include, made = Path(triton.__file__).parent / "backends/nvidia/include", folder / "libdriver.so"
    flags = ["-shared", "-fPIC", "-Wall", "-Werror", f"-I{include}", "-o", str(made), str(_SOURCE)]
    subprocess.run([compiler, *flags], check=True)
    return ctypes.CDLL(str(made))


class HostMemory(FixedMemory):
    """On the host, read and written as a tensor there."""

    def __init__(self, driver: ctypes.CDLL, nbytes: int):
        super().__init__(nbytes, DEVICE, driver)

    def tensor(self) -> Tensor:
        """A tensor of the memory that does not keep this object alive."""
        return torch.frombuffer((ctypes.c_uint8 * self.nbytes).from_address(self.address), dtype=torch.uint8)
