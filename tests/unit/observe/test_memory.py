"""Peaks by phase: of resident memory for real, of CUDA's allocator against a stand-in."""

from __future__ import annotations

import mmap

import pytest
import torch

from megatron_tlt.observe.memory import MIB, PhasePeaks, reset_cuda_peak
from megatron_tlt.observe.reduction import values_of


class Allocator:
    """Stands in for CUDA's caching allocator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = self.most = 0
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.most)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: setattr(self, "most", self.now))

    def use(self, *sizes: int) -> None:
        """Allocates MiB; negative ones are freed."""
        for size in sizes:
            self.now += size * MIB
            self.most = max(self.most, self.now)


def test_every_phase_has_its_own_peak(monkeypatch: pytest.MonkeyPatch):
    device, memory = torch.device("cuda", 0), Allocator(monkeypatch)
    peaks = PhasePeaks(device)
    for sizes in ((3, -3), (5, -4), (1, -1)):
        with peaks.phase("a"):
            memory.use(*sizes)
    memory.use(50, -50)  # outside of any phase
    with peaks.phase("b"):
        memory.use(7, -6)
        reset_cuda_peak(device)  # as a capture of graphs does in the middle of a rollout
        memory.use(2)
    assert values_of([peaks.take()]) == {"memory/a_peak_mib": 5.0, "memory/b_peak_mib": 8.0}
    assert peaks.take() == {}
    with pytest.raises(AssertionError, match="inside another"), peaks.phase("a"), peaks.phase("b"):
        pass


def test_resident_memory_is_seen_while_it_is_there():
    peaks = PhasePeaks(torch.device("cpu"))
    with peaks.phase("before"):
        pass
    # Gone before the phase ends, and no allocator's: that might reuse what this process has had before.
    with peaks.phase("large"), mmap.mmap(-1, 64 * MIB) as fresh:
        for at in range(0, len(fresh), mmap.PAGESIZE):
            fresh[at] = 1
    with peaks.phase("after"):
        pass
    found = values_of([peaks.take()])
    grown = found["memory/large_peak_mib"] - found["memory/before_peak_mib"]
    assert 56 < grown < 80
    assert found["memory/after_peak_mib"] < found["memory/large_peak_mib"] - 48
