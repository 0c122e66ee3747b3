"""A GPU's index by its UUID, from NVML."""

from __future__ import annotations

from typing import Any

import pynvml


def index_of(name: str, nvml: Any = pynvml) -> int:
    """The index in the order of the PCI bus of the GPU whose UUID begins with `name`, as CUDA_VISIBLE_DEVICES has it.

    Raises ValueError if it is no GPU's, several GPUs' or a MIG slice's (which has no index), or if NVML gives none.
    """
    if not name.startswith("GPU-"):
        raise ValueError(f"{name!r} is no GPU's UUID, and has no index")
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        found = [i for i, handle in enumerate(handles) if nvml.nvmlDeviceGetUUID(handle).startswith(name)]
    except nvml.NVMLError as error:
        raise ValueError(f"the index of {name!r} is not known: NVML says {error}") from error
    if len(found) != 1:
        raise ValueError(f"{len(found)} GPUs have a UUID that begins with {name!r}")
    return found[0]
