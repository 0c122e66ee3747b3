"""The peak of memory in each phase of a step on this rank.

On CUDA it is the allocator's peak and, beside it, the memory mapped outside of it (`count_outside`): tensors, not the
CUDA context, NCCL's channels or other processes; the sum is exact where both peaks fall together. On CPU it is the
peak of the process's resident memory (VmHWM, reset through /proc/self/clear_refs), with the interpreter and its
libraries. Where the kernel refuses the reset nothing is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from megatron_tlt.observe.reduction import Metric, RankMetrics, Reduce

MIB = 2**20
_PROC = Path("/proc/self")
_cuda = {"before_reset": 0, "outside": 0, "outside_peak": 0}
"""Bytes on this rank's GPU: the present phase's peak before a reset inside the phase; those mapped outside the
allocator now, and at most in the phase."""


def count_outside(nbytes: int) -> None:
    """Counts `nbytes` that were mapped (negative: unmapped) without PyTorch's allocator."""
    _cuda["outside"] += nbytes
    _cuda["outside_peak"] = max(_cuda["outside_peak"], _cuda["outside"])


def reset_cuda_peak(device: torch.device) -> None:
    """Resets the allocator's peak for a measurement inside a phase, and keeps what the phase had so far."""
    _cuda["before_reset"] = _allocated_peak(device)
    torch.cuda.reset_peak_memory_stats(device)


def _allocated_peak(device: torch.device) -> int:
    return max(int(torch.cuda.max_memory_allocated(device)), _cuda["before_reset"])


def _cuda_peak(device: torch.device) -> int:
    return _allocated_peak(device) + _cuda["outside_peak"]


def _begin_cuda(device: torch.device) -> None:
    _cuda.update(before_reset=0, outside_peak=_cuda["outside"])
    torch.cuda.reset_peak_memory_stats(device)


def _begin_resident() -> None:
    (_PROC / "clear_refs").write_text("5")


def _resident_peak() -> int:
    lines = (_PROC / "status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


class PhasePeaks:
    """Peaks by phase since they were last taken. Phases follow each other; one inside another is an assertion."""

    def __init__(self, device: torch.device):
        """For this process on `device`; measures nothing where the system does not say."""
        self._begin: Callable[[], None] = _begin_resident
        self._peak: Callable[[], int] = _resident_peak
        if device.type == "cuda":
            self._begin, self._peak = partial(_begin_cuda, device), partial(_cuda_peak, device)
        self._peaks: dict[str, int] = {}
        self._is_open = False
        try:
            self._begin()
            self._peak()
            self._is_measured = True
        except (OSError, StopIteration):
            self._is_measured = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures the block; of a phase that comes again the highest peak counts."""
        if not self._is_measured:
            yield
            return
        assert not self._is_open, f"phase {name} inside another one"
        self._is_open = True
        self._begin()
        try:
            yield
        finally:
            self._is_open = False
            self._peaks[name] = max(self._peaks.get(name, 0), self._peak())

    def take(self) -> RankMetrics:
        """`memory/<phase>_peak_mib` since the last call, maxima over ranks. Resets them."""
        peaks, self._peaks = self._peaks, {}
        return {f"memory/{name}_peak_mib": Metric(peak / MIB, Reduce.MAX) for name, peak in peaks.items()}
