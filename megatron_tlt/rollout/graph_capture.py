"""Captured steps under one memory budget, and the machinery that captures them.

A *step* is a function without arguments that reads static buffers and writes static buffers, gives the same result
however often it runs, and never looks at a value from the host. Capturing it turns its kernels into one launch.
All captured steps take their temporary memory from one pool: they never run at the same time, so each may use what
the others left, and the pool is as large as the largest step, not as the sum.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron_tlt.observe.memory import reset_cuda_peak

Step = Callable[[], object]


@dataclass(slots=True)
class Captured:
    """One captured step."""

    replay: Step  # runs the step again on whatever its buffers now hold
    nbytes: int = 0  # memory that is free again when it is dropped, beyond the shared pool


class Capturer(Protocol):
    """What makes captured steps. `pool_bytes` is the temporary memory they share now."""

    pool_bytes: int

    def warm_up(self, step: Step) -> int:
        """Runs `step` as capturing needs it; returns the bytes of temporary memory that one run takes."""

    def capture(self, step: Step) -> Captured:
        """Records `step` without running it. Grows `pool_bytes` where the step needs more."""

    def free_pool(self) -> None:
        """Frees the shared memory, after the last captured step was dropped."""


@dataclass(slots=True)
class GraphStats:
    """Counters of a cache of captured steps. Bytes and `graphs` are as of now, the rest since the start."""

    graphs: int = 0
    memory_bytes: int = 0  # static buffers, shared pool and the memory that only one graph uses
    captures: int = 0
    capture_seconds: float = 0.0
    replays: int = 0
    evictions: int = 0
    refused: int = 0  # keys that the budget has no room for
    eager_over_budget: int = 0  # steps of such keys, run without a graph
    eager_too_large: int = 0  # steps beyond the static buffers, run without a graph
    rows: int = 0  # rows that were wanted
    padded_rows: int = 0  # rows that were computed to fill a bucket


class GraphCache:
    """Captured steps by key, the least recently used dropped first when memory runs short.

    `fixed_bytes` (static buffers) count towards `budget_bytes` (None: no limit). A key whose step does not fit even
    alone is refused for good and runs eagerly.
    """

    def __init__(self, capturer: Capturer, budget_bytes: int | None = None, fixed_bytes: int = 0):
        self._capturer = capturer
        self._budget = budget_bytes
        self._fixed = fixed_bytes
        self._graphs: OrderedDict[Hashable, Captured] = OrderedDict()
        self._refused: set[Hashable] = set()
        self._stats = GraphStats()

    @property
    def memory_bytes(self) -> int:
        """Static buffers, shared pool and every graph's own memory, in bytes."""
        return self._fixed + self._capturer.pool_bytes + self._own_bytes()

    @property
    def keys(self) -> list[Hashable]:
        """Keys of the captured steps, least recently used first."""
        return list(self._graphs)

    @property
    def stats(self) -> GraphStats:
        """Counters so far. The same object every time."""
        stats = self._stats
        stats.graphs, stats.memory_bytes, stats.refused = (
            len(self._graphs),
            self.memory_bytes,
            len(self._refused),
        )
        return stats

    def run(self, key: Hashable, step: Step) -> None:
        """Runs `step`, by its graph where there is one or room for one."""
        graph = self._graphs.get(key)
        if graph is None and key not in self._refused:
            graph = self._capture(key, step)
        if graph is None:
            self._stats.eager_over_budget += 1
            step()
            return
        self._graphs.move_to_end(key)
        self._stats.replays += 1
        graph.replay()

    def clear(self) -> None:
        """Drops every graph and the pool, and forgets what was refused."""
        self._graphs.clear()
        self._refused.clear()
        self._capturer.free_pool()

    def _capture(self, key: Hashable, step: Step) -> Captured | None:
        started = time.perf_counter()
        needed = self._capturer.warm_up(step)
        if not self._make_room(needed):
            self._refused.add(key)
            return None
        graph = self._capturer.capture(step)
        self._graphs[key] = graph
        self._stats.captures += 1
        self._stats.capture_seconds += time.perf_counter() - started
        if not self._shrink(keep=key):
            # What was measured exceeds what was foreseen: the pool grew and shrinks only when it is empty.
            del graph
            self._drop(key)
            self._refused.add(key)
            return None
        return graph

    def _make_room(self, needed: int) -> bool:
        """Drops graphs until a step with `needed` temporary bytes fits; False, and drops none, if that cannot help."""
        if self._budget is None:
            return True
        shared = self._fixed + max(self._capturer.pool_bytes, needed)
        own = max((g.nbytes for g in self._graphs.values()), default=0)  # what the new graph may take
        if shared + own > self._budget:
            return False
        while self._graphs and shared + self._own_bytes() + own > self._budget:
            self._drop(next(iter(self._graphs)))
        return True

    def _shrink(self, keep: Hashable) -> bool:
        """Drops other graphs than `keep` while memory exceeds the budget; returns whether it fits now."""
        if self._budget is None:
            return True
        if self._fixed + self._capturer.pool_bytes + self._graphs[keep].nbytes > self._budget:
            return False
        while self.memory_bytes > self._budget:
            self._drop(next(k for k in self._graphs if k != keep))
        return True

    def _drop(self, key: Hashable) -> None:
        del self._graphs[key]
        self._stats.evictions += 1
        if not self._graphs:
            self._capturer.free_pool()

    def _own_bytes(self) -> int:
        return sum(g.nbytes for g in self._graphs.values())


class EagerCapturer:
    """For devices without graphs: the step itself, over buffers that are made once."""

    pool_bytes = 0

    def warm_up(self, step: Step) -> int:
        """Nothing to do."""
        return 0

    def capture(self, step: Step) -> Captured:
        """The step itself."""
        return Captured(step)

    def free_pool(self) -> None:
        """Nothing to do."""


class AgreedCapturer:
    """Another capturer on every rank of a group: each number is the largest of all ranks.

    What is captured, refused and dropped follows from these numbers and from the order of the steps, so all ranks
    decide alike, and no rank waits in a collective that another one has not captured. Every call is collective.
    """

    def __init__(self, inner: Capturer, largest: Callable[[int], int]):
        """`largest(value)` is the largest of the values that the ranks give (`distributed.agree_on`)."""
        self._inner, self._largest = inner, largest
        self.pool_bytes = 0

    def warm_up(self, step: Step) -> int:
        """See `Capturer`."""
        return self._largest(self._inner.warm_up(step))

    def capture(self, step: Step) -> Captured:
        """See `Capturer`."""
        made = self._inner.capture(step)
        self.pool_bytes = self._largest(self._inner.pool_bytes)
        return Captured(made.replay, self._largest(made.nbytes))

    def free_pool(self) -> None:
        """See `Capturer`."""
        self._inner.free_pool()
        self.pool_bytes = 0


class CudaCapturer:
    """CUDA graphs in one memory pool of one device. The host waits for the device at captures only."""

    def __init__(self, device: torch.device):
        self.pool_bytes = 0
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._handle: Any = None  # torch's name of the pool
        self._needed = 0  # temporary bytes of the step that was warmed up last

    def warm_up(self, step: Step) -> int:
        """A run on a side stream: libraries load kernels and take workspaces, which a capture must not."""
        torch.cuda.synchronize(self._device)
        reset_cuda_peak(self._device)  # the rollout's own peak is measured around this
        before = torch.cuda.memory_allocated(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            step()
        torch.cuda.synchronize(self._device)
        self._needed = int(torch.cuda.max_memory_allocated(self._device) - before)
        return self._needed

    def capture(self, step: Step) -> Captured:
        """One graph. Errors of other threads' CUDA calls (a trainer's, NCCL's watchdog) do not end the capture."""
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        if self._free_bytes() < 2 * self._needed:
            torch.cuda.empty_cache()  # what the allocator keeps; it cannot give it back during a capture
        free, reserved = self._free_bytes(), torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._handle, stream=self._stream, capture_error_mode="thread_local"
        ):
            step()
        torch.cuda.synchronize(self._device)
        grown = max(0, int(torch.cuda.memory_reserved(self._device)) - int(reserved))
        self.pool_bytes += grown
        return Captured(graph.replay, max(0, free - self._free_bytes() - grown))

    def free_pool(self) -> None:
        """The allocator takes the segments back when no graph uses the handle; a new pool starts."""
        self._handle, self.pool_bytes = None, 0
        torch.cuda.empty_cache()

    def _free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])
