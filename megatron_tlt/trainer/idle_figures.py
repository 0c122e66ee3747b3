"""Figures of one rank's idle windows, for the metrics of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_tlt.idle.window import WindowReport
    from megatron_tlt.observe.gpu import GpuMonitor


class IdleFigures:
    """Sums over the windows of a step, under the names of `RunMetrics.log`."""

    def __init__(self, gpu: GpuMonitor, is_group_leader: bool):
        """`is_group_leader`: the ranks of a replica train as one, so only its leader counts micro-steps."""
        self._gpu, self._is_group_leader = gpu, is_group_leader
        self._figures: dict[str, float] = {}

    @contextmanager
    def gpu_measured(self) -> Iterator[None]:
        """Around a window: measures the GPU's utilization, memory and energy."""
        self._gpu.start()
        yield
        # Energy adds up over ranks; of the others the highest is reported.
        measured = self._gpu.stop().items()
        self._add({name if name == "gpu/energy_j" else f"{name}_max": value for name, value in measured})

    def add(self, report: WindowReport) -> None:
        """Adds a window."""
        self._add({"idle/seconds": report.idle_seconds, "idle/recovered_seconds": report.training_seconds})
        if self._is_group_leader:
            self._add({"drafter/steps": float(report.steps), "drafter/tokens": float(report.tokens)})
        for name in ("loss", "accept/1"):
            if name in report.metrics:
                self._figures[f"drafter/{name}_mean"] = report.metrics[name]
        if report.stop_seconds is not None:
            self._add({"idle/stop_ms_max": 1e3 * max(0.0, report.stop_seconds)})

    def take(self) -> dict[str, float]:
        """The figures since the last call."""
        figures, self._figures = self._figures, {}
        return figures

    def _add(self, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            old = self._figures.get(name, 0.0)
            self._figures[name] = max(old, value) if name.endswith("_max") else old + value
