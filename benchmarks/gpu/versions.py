"""What is installed, and what this device reaches: a copy and a matrix product against its data sheet."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from benchmarks.gpu.bounds import data_sheet
from benchmarks.gpu.check import Check, measured_peaks
from benchmarks.gpu.result import Result

PACKAGES = (
    "triton", "megatron-core", "transformer-engine", "transformer-engine-torch", "apex",
    "transformers", "mpi4py", "nvidia-cudnn-cu13", "nvidia-nccl-cu13",
)  # fmt: skip
LEAST_SHARE = 0.5  # of the data sheet's figures: less is a throttled, shared or misread device


def run(check: Check, found: Result) -> None:
    """Versions, the GPU, and its two peaks."""
    found.note({"python": platform.python_version(), "torch": torch.__version__})
    found.note({name: installed(name) for name in PACKAGES})
    peaks = measured_peaks(check)
    if check.is_cuda:
        free, total = torch.cuda.mem_get_info(check.device)
        properties = torch.cuda.get_device_properties(check.device)
        of_gpu: dict[str, float | str] = {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            "memory_gib": total / 2**30,
            "free_gib": free / 2**30,
        }
        found.note(of_gpu)
    found.note({"copy_gb_s": peaks.bandwidth / 1e9, "matmul_tflops": peaks.flops / 1e12})
    sheet = data_sheet(str(found.summary.get("gpu", "")))
    if sheet is not None:
        shares = {"copy_of_sheet": peaks.bandwidth / sheet.bandwidth, "matmul_of_sheet": peaks.flops / sheet.flops}
        found.note(shares)
        for name, share in shares.items():
            if share < LEAST_SHARE:
                found.fail(f"{name} is {share:.2f}")


def installed(package: str) -> str:
    """Its version."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
