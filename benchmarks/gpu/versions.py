"""What is installed, and what this device reaches: a copy and a matrix product against its data sheet."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from benchmarks.gpu.bounds import data_sheet
from benchmarks.gpu.check import Check, Result, measured_peaks

PACKAGES = (
    "triton", "megatron-core", "transformer-engine", "transformer-engine-torch", "apex",
    "transformers", "mpi4py", "nvidia-cudnn-cu13", "nvidia-nccl-cu13",
)  # fmt: skip
LEAST_SHARE = 0.5  # of the data sheet's figures: less is a throttled, shared or misread device


def run(check: Check) -> Result:
    """Versions, the GPU, and its two peaks."""
    found = Result()
    found.summary |= {"python": platform.python_version(), "torch": torch.__version__}
    for name in PACKAGES:
        try:
            found.summary[name] = version(name)
        except PackageNotFoundError:
            found.summary[name] = "absent"
    peaks = measured_peaks(check, "CPU")
    if check.is_cuda:
        free, total = torch.cuda.mem_get_info(check.device)
        properties = torch.cuda.get_device_properties(check.device)
        found.summary |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            "memory_gib": total / 2**30,
            "free_gib": free / 2**30,
        }
    found.summary |= {"copy_gb_s": peaks.bandwidth / 1e9, "matmul_tflops": peaks.flops / 1e12}
    sheet = data_sheet(str(found.summary.get("gpu", "")))
    if sheet is not None:
        shares = {
            "copy_of_sheet": peaks.bandwidth / sheet.bandwidth,
            "matmul_of_sheet": peaks.flops / sheet.flops,
        }
        found.summary |= shares
        found.failures += [f"{name} is {v:.2f}" for name, v in shares.items() if v < LEAST_SHARE]
    return found
