"""The cases of `benchmarks/gpu/kernels.py`, one by one, on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gpu.check import Check
from benchmarks.gpu.kernels import CASES
from benchmarks.gpu_check import RECIPE


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_its_reference(name: str, tmp_path: Path):
    error, limit = CASES[name](Check(torch.device("cuda", 0), False, RECIPE, tmp_path))
    assert error <= limit
