"""The peak of memory in each phase of a step on this rank.

On CUDA it is the allocator's peak: tensors, not the CUDA context, NCCL's channels or other processes. On CPU it is the
peak of the process's resident memory (VmHWM, reset through /proc/self/clear_refs), with the interpreter and its
libraries. Where the kernel refuses the reset nothing is reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

MIB = 2**20
_PROC = Path("/proc/self")
_before_resets: dict[int, int] = {}  # CUDA device: the phase's peak before a reset inside the phase


class PeakCounter(Protocol):
    """A counter of the highest memory since the last reset, in bytes."""

    def reset(self) -> None:
        """Restarts from the present memory. Mutates the counter."""

    def peak(self) -> int:
        """The highest since the last reset. Mutates nothing."""


class CudaPeak:
    """The caching allocator's peak on one device."""

    def __init__(self, device: torch.device):
        self._device = device

    def reset(self) -> None:
        """See `PeakCounter.reset`."""
        _before_resets.pop(_index(self._device), None)
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """See `PeakCounter.peak`."""
        now = int(torch.cuda.max_memory_allocated(self._device))
        return max(now, _before_resets.get(_index(self._device), 0))


class ResidentPeak:
    """VmHWM of this process."""

    def __init__(self, proc: Path = _PROC):
        self._proc = proc

    def reset(self) -> None:
        """See `PeakCounter.reset`. Raises OSError where it is not allowed."""
        (self._proc / "clear_refs").write_text("5")

    def peak(self) -> int:
        """See `PeakCounter.peak`."""
        for line in (self._proc / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise OSError(f"no VmHWM in {self._proc / 'status'}")


def reset_cuda_peak(device: torch.device) -> None:
    """Resets the allocator's peak for a measurement inside a phase, and keeps what the phase had so far."""
    _before_resets[_index(device)] = CudaPeak(device).peak()
    torch.cuda.reset_peak_memory_stats(device)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


class PhasePeaks:
    """Peaks by phase since they were last taken. Phases follow each other; one inside another is an assertion."""

    def __init__(self, counter: PeakCounter | None):
        """None: nothing is measured."""
        self._counter, self._open = counter, False
        self._peaks: dict[str, int] = {}

    @classmethod
    def of(cls, device: torch.device) -> PhasePeaks:
        """For this process on `device`; measures nothing where the system gives no figures."""
        counter: PeakCounter = CudaPeak(device) if device.type == "cuda" else ResidentPeak()
        try:
            counter.reset()
            counter.peak()
        except OSError:
            return cls(None)
        return cls(counter)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures the block; of a phase that comes again the highest peak counts."""
        if self._counter is None:
            yield
            return
        assert not self._open, f"phase {name} inside another one"
        self._open = True
        self._counter.reset()
        try:
            yield
        finally:
            self._open = False
            self._peaks[name] = max(self._peaks.get(name, 0), self._counter.peak())

    def take(self) -> dict[str, float]:
        """`memory/<phase>_peak_mib` since the last call. Resets them."""
        peaks, self._peaks = self._peaks, {}
        return {f"memory/{name}_peak_mib": peak / MIB for name, peak in peaks.items()}
