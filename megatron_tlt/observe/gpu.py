"""NVML's readings of this rank's GPU, for the metrics only: no decision depends on them; and a GPU's index by its UUID.

Utilisation is the share of NVML's last sample period with a kernel running, not how full the GPU was: a spinning
collective reads 100 %. Energy is the whole board's. What NVML does not support (MIG, older boards) is absent.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

import pynvml

_GIB = 2**30
_ENERGY = "gpu/energy_j"
_log = logging.getLogger(__name__)


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


class GpuMonitor:
    """Reads one GPU at the start and at the end of a window. Without driver or GPU it reports nothing."""

    def __init__(self, uuid: str | None, nvml: Any = pynvml):
        """`uuid` as NVML writes it ("GPU-...", "MIG-...") or as torch does, without the prefix; None: no GPU.

        An index would not do: CUDA_VISIBLE_DEVICES renumbers CUDA's devices, not NVML's.
        """
        self._nvml = nvml
        self._handle: Any = None
        self._start: float | None = None
        if uuid is None:
            return
        try:
            nvml.nvmlInit()
            self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid if "-" in uuid[:4] else f"GPU-{uuid}")
        except nvml.NVMLError as error:
            _log.warning("no GPU metrics: NVML says %s", error)

    def start(self) -> None:
        """Begins a window."""
        self._start = self._readings().get(_ENERGY)

    def stop(self) -> dict[str, float]:
        """At the window's end `gpu/utilization` (percent) and `gpu/memory_gib`; of the window `gpu/energy_j`."""
        metrics, start = self._readings(), self._start
        end = metrics.pop(_ENERGY, None)
        return metrics if start is None or end is None else metrics | {_ENERGY: end - start}

    def _readings(self) -> dict[str, float]:
        """Readings now; those that NVML does not support are absent, without a GPU all are."""
        nvml, handle, found = self._nvml, self._handle, {}
        for name, read in (
            ("gpu/utilization", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            ("gpu/memory_gib", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / _GIB),
            (_ENERGY, lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3),
        ):
            with suppress(nvml.NVMLError):
                if handle is not None:
                    found[name] = float(read())
        return found
