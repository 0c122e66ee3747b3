"""Which GPU an engine in another process sees."""

from __future__ import annotations

import os

import torch

from megatron_tlt.errors import ConfigError
from megatron_tlt.observe.gpu import index_of
from megatron_tlt.types import BackendName


def visible_device(device: torch.device, backend: BackendName) -> dict[str, str]:
    """Variables that show an engine of `backend` the rank's GPU alone; none on CPU. Raises ConfigError.

    Engines take the names in CUDA_VISIBLE_DEVICES for integers, so a UUID (which Slurm and Kubernetes write)
    becomes an index, of the order that NVML counts in.
    """
    if device.type != "cuda":
        return {}
    index = device.index if device.index is not None else torch.cuda.current_device()
    ours = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    name = ours[index] if ours else str(index)
    if name.isdigit():
        return {"CUDA_VISIBLE_DEVICES": name}
    try:
        return {"CUDA_VISIBLE_DEVICES": str(index_of(name)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    except ValueError as error:
        allowed = f"needs a GPU's index or UUID in CUDA_VISIBLE_DEVICES, not {name!r}: {error}"
        raise ConfigError.of("rollout.backend", backend, allowed) from error
