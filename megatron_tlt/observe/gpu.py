"""NVML's readings of this rank's GPU, for the metrics only: no decision depends on them; and a GPU's index by its UUID.

Utilisation is the share of NVML's last sample period with a kernel running, not how full the GPU was: a spinning
collective reads 100 %. Energy is the whole board's. What NVML does not support (MIG, older boards) is absent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pynvml

_GIB = 2**30
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

    def __init__(self, uuid: str | None, nvml: Any = pynvml, clock: Callable[[], float] = time.perf_counter):
        """`uuid` as NVML writes it ("GPU-...", "MIG-...") or as torch does, without the prefix; None: no GPU.

        An index would not do: CUDA_VISIBLE_DEVICES renumbers CUDA's devices, not NVML's.
        """
        self._nvml, self._clock = nvml, clock
        self._handle: Any = None
        self._start: dict[str, float] = {}
        if uuid is None:
            return
        try:
            nvml.nvmlInit()
            self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid if "-" in uuid[:4] else f"GPU-{uuid}")
        except nvml.NVMLError as error:
            _log.warning("no GPU metrics: NVML says %s", error)

    def start(self) -> None:
        """Begins a window."""
        self._start = self._readings()

    def stop(self) -> dict[str, float]:
        """Metrics of the window since `start`; empty without a GPU, or without a start.

        `gpu/utilization` (percent, mean of both ends), `gpu/memory_gib` (at the end), `gpu/energy_j`, `gpu/power_w`.
        """
        start, self._start, end = self._start, {}, self._readings()
        if not start or not end:
            return {}
        metrics: dict[str, float] = {}
        if "utilization" in start and "utilization" in end:
            metrics["gpu/utilization"] = (start["utilization"] + end["utilization"]) / 2
        if "memory_bytes" in end:
            metrics["gpu/memory_gib"] = end["memory_bytes"] / _GIB
        if "energy_mj" in start and "energy_mj" in end:
            metrics["gpu/energy_j"] = (end["energy_mj"] - start["energy_mj"]) / 1e3
            if end["at"] > start["at"]:
                metrics["gpu/power_w"] = metrics["gpu/energy_j"] / (end["at"] - start["at"])
        return metrics

    def _readings(self) -> dict[str, float]:
        """Readings now, with the time; those that NVML does not support are absent, without a GPU all are."""
        if self._handle is None:
            return {}
        nvml, handle = self._nvml, self._handle
        found = {"at": self._clock()}
        for name, read in (
            ("utilization", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            ("memory_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
            ("energy_mj", lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle)),
        ):
            try:
                value = read()
            except nvml.NVMLError:
                continue
            if value is not None:
                found[name] = float(value)
        return found
