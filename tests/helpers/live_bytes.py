"""How many bytes of tensors are alive at once: every allocation and release of PyTorch's CPU allocator, in order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass
class LiveBytes:
    """What one block took: bytes in use at its end and at its highest, both since its start."""

    end: int = 0
    peak: int = 0
    steps: list[int] = field(default_factory=list)  # every allocation and release, in order


@contextmanager
def live_bytes() -> Iterator[LiveBytes]:
    """Counts allocations inside the block, also those inside of operators and in backward."""
    counted = LiveBytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        torch.zeros(1)
        yield counted
    results = recorded.profiler.kineto_results
    memory = [e for e in results.events() if e.name() == "[memory]" and e.device_type() == torch.autograd.DeviceType.CPU]
    for event in sorted(memory, key=lambda e: e.start_ns()):
        counted.steps.append(event.nbytes())
        counted.end += event.nbytes()
        counted.peak = max(counted.peak, counted.end)
