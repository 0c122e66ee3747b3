"""What NVML says of this rank's GPU: reported beside the coordinator's view, never decided by.

Utilisation is the share of NVML's last sample period with a kernel running, not how full the GPU was: a spinning
collective reads 100 %. Energy is the whole board's. Where NVML cannot say something (MIG, older boards) the metric is
absent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pynvml

_GIB = 2**30
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One reading; None: NVML does not say."""

    at: float
    """Seconds of the monitor's clock."""
    utilization: float | None
    """Percent of the last sample period (a sixth of a second to a second) with a kernel running."""
    memory_bytes: float | None
    """In use on the board, by whomever."""
    energy_mj: float | None
    """Millijoules since the driver was loaded."""


class GpuMonitor:
    """Reads one GPU at the start and at the end of a window. Without driver or GPU it reports nothing."""

    def __init__(self, uuid: str | None, nvml: Any = pynvml, clock: Callable[[], float] = time.perf_counter):
        """`uuid` as the driver writes it ("GPU-...", "MIG-..."); torch's has no prefix and is understood, too.

        None: this rank has no GPU. Indices are not taken: CUDA_VISIBLE_DEVICES renumbers CUDA's, not NVML's.
        """
        self._nvml, self._clock = nvml, clock
        self._handle: Any = None
        self._start: GpuSample | None = None
        if uuid is None:
            return
        try:
            nvml.nvmlInit()
            self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid if "-" in uuid[:4] else f"GPU-{uuid}")
        except nvml.NVMLError as error:
            _log.warning("no GPU metrics: NVML says %s", error)

    @property
    def is_there(self) -> bool:
        """Whether there is anything to report."""
        return self._handle is not None

    def sample(self) -> GpuSample | None:
        """A reading now; None where there is nothing to read."""
        if self._handle is None:
            return None
        nvml, handle = self._nvml, self._handle
        return GpuSample(
            at=self._clock(),
            utilization=self._read(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            memory_bytes=self._read(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
            energy_mj=self._read(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle)),
        )

    def start(self) -> None:
        """A window begins."""
        self._start = self.sample()

    def stop(self) -> dict[str, float]:
        """Metrics of the window since `start`; empty without a GPU, or without a start."""
        start, end = self._start, self.sample()
        self._start = None
        return {} if start is None or end is None else window_metrics(start, end)

    def close(self) -> None:
        """Lets go of NVML. A second call does nothing."""
        if self._handle is not None:
            self._handle = None
            self._read(self._nvml.nvmlShutdown)

    def _read(self, call: Callable[[], Any]) -> float | None:
        try:
            value = call()
        except self._nvml.NVMLError:  # not supported here: the metric is absent
            return None
        return None if value is None else float(value)


def window_metrics(start: GpuSample, end: GpuSample) -> dict[str, float]:
    """`gpu/utilization` (percent, mean of both ends), `gpu/memory_gib` (at the end), `gpu/energy_j`, `gpu/power_w`."""
    metrics: dict[str, float] = {}
    if start.utilization is not None and end.utilization is not None:
        metrics["gpu/utilization"] = (start.utilization + end.utilization) / 2
    if end.memory_bytes is not None:
        metrics["gpu/memory_gib"] = end.memory_bytes / _GIB
    if start.energy_mj is not None and end.energy_mj is not None:
        metrics["gpu/energy_j"] = (end.energy_mj - start.energy_mj) / 1e3
        if end.at > start.at:
            metrics["gpu/power_w"] = metrics["gpu/energy_j"] / (end.at - start.at)
    return metrics
