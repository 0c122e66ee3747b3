"""Peaks by phase: of resident memory for real, of CUDA's allocator against a stand-in."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from megatron_tlt.observe import memory
from megatron_tlt.observe.memory import MIB, CudaPeak, PhasePeaks, ResidentPeak, reset_cuda_peak
from megatron_tlt.trainer.metrics import combined


class Counter:
    """A counter that is told what happened."""

    def __init__(self):
        self.now = self.most = 0

    def use(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)

    def reset(self) -> None:
        self.most = self.now

    def peak(self) -> int:
        return self.most


def test_every_phase_has_its_own_peak():
    counter = Counter()
    peaks = PhasePeaks(counter)
    for sizes in ((3, -3), (5, -4), (1, -1)):
        with peaks.phase("a"):
            for size in sizes:
                counter.use(size * MIB)
    counter.use(50 * MIB)  # outside of any phase
    counter.use(-50 * MIB)
    with peaks.phase("b"):
        counter.use(2 * MIB)
    assert peaks.take() == {"memory/a_peak_mib": 5.0, "memory/b_peak_mib": 3.0}
    assert peaks.take() == {}
    with pytest.raises(AssertionError, match="inside another"), peaks.phase("a"), peaks.phase("b"):
        pass


def test_resident_memory_is_seen_while_it_is_there():
    peaks = PhasePeaks.of(torch.device("cpu"))
    with peaks.phase("before"):
        pass
    # Gone before the phase ends, and no allocator's: that might reuse what this process has had before.
    with peaks.phase("large"), mmap.mmap(-1, 64 * MIB) as fresh:
        for at in range(0, len(fresh), mmap.PAGESIZE):
            fresh[at] = 1
    with peaks.phase("after"):
        pass
    found = peaks.take()
    grown = found["memory/large_peak_mib"] - found["memory/before_peak_mib"]
    assert 56 < grown < 80
    assert found["memory/after_peak_mib"] < found["memory/large_peak_mib"] - 48


def test_without_figures_nothing_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "ResidentPeak", lambda: ResidentPeak(tmp_path / "absent"))
    peaks = PhasePeaks.of(torch.device("cpu"))
    with peaks.phase("a"):
        pass
    assert peaks.take() == {}


def test_a_reset_inside_a_phase_loses_no_peak(monkeypatch: pytest.MonkeyPatch):
    """What a capture of graphs does in the middle of a rollout."""
    counter, device = Counter(), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: counter.peak())
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: counter.reset())
    peaks = PhasePeaks(CudaPeak(device))
    with peaks.phase("rollout"):
        counter.use(7 * MIB)
        counter.use(-6 * MIB)
        reset_cuda_peak(device)
        counter.use(2 * MIB)
    with peaks.phase("update"):
        counter.use(1 * MIB)
    assert peaks.take() == {"memory/rollout_peak_mib": 7.0, "memory/update_peak_mib": 4.0}


def test_ranks_report_the_highest():
    ranks = [{"memory/update_peak_mib": 3.0, "x": 1.0}, {"memory/update_peak_mib": 5.0, "x": 1.0}]
    assert combined(ranks) == {"memory/update_peak_mib": 5.0, "x": 2.0}
