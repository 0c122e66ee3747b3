"""NVML readings from a fake module that has the real one's names, and the real one where there is no driver."""

import ctypes.util
import logging
from types import SimpleNamespace

import pynvml
import pytest

from megatron_tlt.observe.gpu import GpuMonitor

NOT_SUPPORTED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


class FakeNvml:
    """One GPU, "GPU-1234". `without`: functions that are not supported."""

    NVMLError = pynvml.NVMLError

    def __init__(self, *without: str):
        self.without = without
        self.energy, self.utilization = 5_000_000, 80

    def __getattr__(self, name: str):
        assert hasattr(pynvml, name), f"the real module has no {name}"
        responses = {
            "nvmlInit": None,
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=self.utilization, memory=3),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=8 * 2**30, free=2 * 2**30, used=6 * 2**30),
            "nvmlDeviceGetTotalEnergyConsumption": self.energy,
        }

        def call(*arguments):
            if name in self.without:
                raise NOT_SUPPORTED
            if name == "nvmlDeviceGetHandleByUUID":
                if arguments != ("GPU-1234",):
                    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
                return "handle"
            assert arguments in ((), ("handle",))
            return responses[name]

        return call


def window(nvml: FakeNvml, uuid: str = "GPU-1234") -> dict[str, float]:
    monitor = GpuMonitor(uuid, nvml)
    monitor.start()
    nvml.energy, nvml.utilization = nvml.energy + 800_000, 40
    return monitor.stop()


ALL = {"gpu/utilization": 40.0, "gpu/memory_gib": 6.0, "gpu/energy_j": 800.0}


@pytest.mark.parametrize("uuid", ["GPU-1234", "1234"])  # torch leaves the prefix out
def test_a_window_is_reported(uuid):
    assert window(FakeNvml(), uuid) == pytest.approx(ALL)


@pytest.mark.parametrize(
    ("call", "missing"),
    [
        ("nvmlDeviceGetUtilizationRates", "gpu/utilization"),
        ("nvmlDeviceGetMemoryInfo", "gpu/memory_gib"),
        ("nvmlDeviceGetTotalEnergyConsumption", "gpu/energy_j"),
    ],
)
def test_what_nvml_does_not_support_is_absent(call, missing):
    assert window(FakeNvml(call)) == {name: value for name, value in ALL.items() if name != missing}


@pytest.mark.skipif(ctypes.util.find_library("nvidia-ml") is not None, reason="there is a driver here")
def test_the_real_module_without_a_driver(caplog):
    with caplog.at_level(logging.WARNING):
        monitor = GpuMonitor("GPU-1234")
        monitor.start()
        assert monitor.stop() == {}
    assert [r.getMessage() for r in caplog.records] == [
        "no GPU metrics: NVML says NVML Shared Library Not Found"
    ]
