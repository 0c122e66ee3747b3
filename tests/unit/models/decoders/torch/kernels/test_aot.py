"""Every kernel compiles ahead of time for sm_90, spills no register, and keeps to its budget of them: with the triton
that requirements-dev.txt pins, which torch's CUDA build asks for.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[6]
_SHARED = 227 * 1024  # bytes of one processor of an H100: two blocks shall fit
_REGISTERS = {  # a thread; what a kernel takes now, and a little more
    "_draw": 184,
    "_best_candidates": 112,
    "_add_norm": 48,
    "_rotate_into": 40,
    "_gated_silu": 40,
    "_attend bf16 16": 128,
    "_attend bf16 16 HAS_LOW": 152,
    "_attend bf16 64": 244,
    "_attend fp32 64": 88,
    "_attend bf16 64 HAS_LOW BLOCK": 244,
    "_attend fp32 64 HAS_LOW BLOCK": 88,
    "_attend bf16 64 INVARIANT": 200,
    "_attend fp32 64 INVARIANT": 72,
    "_combine": 88,
    "_scores": 48,
    "_choose": 40,
    "_group": 64,
    "_gate_up": 136,
    "_gate_up fp32": 255,
    "_down": 104,
    "_down fp32": 176,
    "_sum": 40,
    "_product": 128,
    "_product fp32": 128,
}


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_compile_for_sm_90_within_registers_and_shared_memory() -> None:
    """In a process of its own: this one may have imported triton for its interpreter."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.aot"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert {kernel["kernel"] for kernel in found} == set(_REGISTERS)
    for kernel in found:
        assert kernel["local"] == 0 and kernel["stack"] <= 16, f"registers spill: {kernel}"
        assert kernel["registers"] <= _REGISTERS[kernel["kernel"]], kernel
        assert 2 * kernel["shared"] <= _SHARED, kernel
