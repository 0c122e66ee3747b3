"""How many bytes of tensors are alive at once: every allocation and release of PyTorch's CPU allocator, in order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


@dataclass
class LiveBytes:
    """What one block took: bytes in use at its end and at its highest, both since its start."""

    end: int = 0
    peak: int = 0


@contextmanager
def live_bytes() -> Iterator[LiveBytes]:
    """Counts allocations inside the block, also those inside of operators and in backward."""
    counted = LiveBytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        torch.zeros(1)
        yield counted
    events = recorded.profiler.kineto_results.events()
    memory = [e for e in events if e.name() == "[memory]" and e.device_type() == DeviceType.CPU]
    for event in sorted(memory, key=lambda e: e.start_ns()):
        counted.end += event.nbytes()
        counted.peak = max(counted.peak, counted.end)
