"""NVML readings from a fake module that has the real one's names, and the real one where there is no driver."""

import ctypes.util
import logging
from types import SimpleNamespace

import pynvml
import pytest

from megatron_tlt.observe.gpu import GpuMonitor

NAMES = (
    "nvmlInit",
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetTotalEnergyConsumption",
)
NOT_SUPPORTED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


class FakeNvml:
    """One GPU, "GPU-1234". Only names that the real module has can be used."""

    NVMLError = pynvml.NVMLError

    def __init__(self, without: tuple[str, ...] = ()):
        self.without, self.calls = without, []
        self.energy, self.utilization = 5_000_000, 80

    def __getattr__(self, name: str):
        assert name in NAMES and hasattr(pynvml, name), name

        def call(*arguments):
            self.calls.append(name)
            if name in self.without:
                raise NOT_SUPPORTED
            return getattr(self, f"_{name}")(*arguments)

        return call

    def _nvmlInit(self):
        pass

    def _nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != "GPU-1234":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return "handle"

    def _nvmlDeviceGetUtilizationRates(self, handle):
        assert handle == "handle"
        return SimpleNamespace(gpu=self.utilization, memory=3)

    def _nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=8 * 2**30, free=2 * 2**30, used=6 * 2**30)

    def _nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return self.energy


def window(nvml: FakeNvml, uuid: str = "GPU-1234") -> dict[str, float]:
    times = iter([10.0, 14.0])
    monitor = GpuMonitor(uuid, nvml, clock=lambda: next(times))
    monitor.start()
    nvml.energy, nvml.utilization = nvml.energy + 800_000, 40
    return monitor.stop()


ALL = {"gpu/utilization": 60.0, "gpu/memory_gib": 6.0, "gpu/energy_j": 800.0, "gpu/power_w": 200.0}


@pytest.mark.parametrize("uuid", ["GPU-1234", "1234"])  # torch leaves the prefix out
def test_a_window_is_reported(uuid):
    nvml = FakeNvml()
    assert window(nvml, uuid) == pytest.approx(ALL)
    assert nvml.calls.count("nvmlInit") == 1


@pytest.mark.parametrize(
    ("call", "missing"),
    [
        ("nvmlDeviceGetUtilizationRates", ["gpu/utilization"]),
        ("nvmlDeviceGetMemoryInfo", ["gpu/memory_gib"]),
        ("nvmlDeviceGetTotalEnergyConsumption", ["gpu/energy_j", "gpu/power_w"]),
    ],
)
def test_what_nvml_cannot_say_is_absent(call, missing):
    wanted = {name: value for name, value in ALL.items() if name not in missing}
    assert window(FakeNvml(without=(call,))) == pytest.approx(wanted)


def test_a_gpu_that_nvml_does_not_know_is_said_once(caplog):
    with caplog.at_level(logging.WARNING):
        assert window(FakeNvml(), "GPU-9") == {}
    assert [r.getMessage() for r in caplog.records] == ["no GPU metrics: NVML says Not Found"]


def test_a_rank_without_gpu_says_nothing(caplog):
    monitor = GpuMonitor(None, FakeNvml(without=NAMES))
    monitor.start()
    assert monitor.stop() == {}
    assert caplog.records == []


def test_stop_without_start_reports_nothing():
    assert GpuMonitor("GPU-1234", FakeNvml()).stop() == {}


@pytest.mark.skipif(ctypes.util.find_library("nvidia-ml") is not None, reason="there is a driver here")
def test_the_real_module_without_a_driver(caplog):
    with caplog.at_level(logging.WARNING):
        monitor = GpuMonitor("GPU-1234")
        monitor.start()
        assert monitor.stop() == {}
    assert [r.getMessage() for r in caplog.records] == [
        "no GPU metrics: NVML says NVML Shared Library Not Found"
    ]
