"""Captured steps under one memory budget, and the machinery that captures them.

A *step* is a function without arguments that reads static buffers and writes static buffers, gives the same result
however often it runs, and never looks at a value from the host. Capturing it turns its kernels into one launch.
All captured steps take their temporary memory from one pool: they never run at the same time, so the pool
is as large as the largest step, not as the sum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.errors import BackendError
from megatron_tlt.observe.memory import reset_cuda_peak

StaticStep = Callable[[], object]


@dataclass(slots=True)
class Captured:
    """One captured step."""

    replay: StaticStep  # runs the step again on whatever its buffers now hold
    nbytes: int = 0  # memory beyond the shared pool, which is free again when the step is dropped


@dataclass(slots=True)
class GraphStats:
    """Counters of a cache of captured steps, since its start."""

    capture_seconds: float = 0.0
    replays: int = 0
    refused: int = 0  # keys that the budget has no room for
    eager: int = 0  # steps whose key was not captured, or larger than the buffers: without a graph


class EagerCapturer:
    """Makes captured steps. On devices without graphs a captured step is the step itself, over its static buffers.

    `pool_bytes` is the temporary memory that all captured steps share now.
    """

    pool_bytes = 0

    def warm_up(self, step: StaticStep) -> int:
        """Prepares the capture of `step` (here: nothing to do); returns the bytes of temporary memory of one run."""
        return 0

    def capture(self, step: StaticStep) -> Captured:
        """Records `step` without running it. Grows `pool_bytes` where the step needs more."""
        return Captured(step)


class GraphCache:
    """Captured steps by key, within `budget_bytes` (None: no limit); `fixed_bytes` (static buffers) count towards it.

    Nothing is captured while requests run, and nothing is dropped before `clear`: a step whose key was not captured
    runs as it is.
    """

    def __init__(
        self,
        capturer: EagerCapturer,
        budget_bytes: int | None = None,
        fixed_bytes: int = 0,
        tp: TensorParallel | None = None,
    ):
        """All ranks of an engine, `tp`, must capture the same steps, since steps hold collectives: `capture` is
        collective and decides by the largest memory of all ranks.
        """
        self._capturer, self._budget, self._fixed = capturer, budget_bytes, fixed_bytes
        self._tp = tp or TensorParallel()
        self._pool = 0  # shared temporary memory, of the rank that has most
        self._graphs: dict[Hashable, Captured] = {}
        self.stats = GraphStats()
        self._taken = 0, 0  # replays and eager steps, by `take_counts`

    @property
    def memory_bytes(self) -> int:
        """Static buffers, shared pool and every graph's own memory, in bytes."""
        return self._fixed + self._pool + sum(g.nbytes for g in self._graphs.values())

    @property
    def keys(self) -> list[Hashable]:
        """Keys of the captured steps, in the order of their capture."""
        return list(self._graphs)

    @property
    def report(self) -> str:
        """A line: how many of the steps that were to be captured have a graph, and the memory."""
        captured, limit = len(self._graphs), "" if self._budget is None else f" of {self._budget / 2**20:.0f}"
        steps = f"{captured} of {captured + self.stats.refused} steps have a CUDA graph"
        others = "; the others run without, slower: rollout.graph_memory_mib" * (self.stats.refused > 0)
        return f"{steps}, in {self.memory_bytes / 2**20:.0f}{limit} MiB{others}"

    def take_counts(self) -> tuple[int, int]:
        """Replays and eager steps since the last call. Mutates."""
        now, (replays, eager) = (self.stats.replays, self.stats.eager), self._taken
        self._taken = now
        return now[0] - replays, now[1] - eager

    def capture(self, key: Hashable, step: StaticStep) -> bool:
        """Captures `step` if the budget has room for it; returns whether it has. Mutates."""
        started = time.perf_counter()
        needed = self._tp.largest(self._capturer.warm_up(step))
        own = max((g.nbytes for g in self._graphs.values()), default=0)  # expected of the new graph
        is_kept = self._fits(max(0, needed - self._pool) + own)
        if is_kept:
            captured = self._capturer.capture(step)
            self._pool = self._tp.largest(self._capturer.pool_bytes)
            self._graphs[key] = Captured(captured.replay, self._tp.largest(captured.nbytes))
            is_kept = self._fits(0)
            if not is_kept:  # it took more than was foreseen; the shared pool does not shrink
                del self._graphs[key]
        if not is_kept:
            self.stats.refused += 1
        self.stats.capture_seconds += time.perf_counter() - started
        return is_kept

    def run(self, key: Hashable, step: StaticStep) -> None:
        """Runs `step`, by its graph where there is one."""
        graph = self._graphs.get(key)
        if graph is None:
            self.stats.eager += 1
            step()
            return
        self.stats.replays += 1
        graph.replay()

    def clear(self) -> None:
        """Drops every captured step; from now on all steps run without a graph. Mutates.

        NCCL's communicators wait at their end for the graphs that hold their collectives.
        """
        self._graphs.clear()

    def _fits(self, more: int) -> bool:
        return self._budget is None or self.memory_bytes + more <= self._budget


class CudaCapturer(EagerCapturer):
    """CUDA graphs in one memory pool of one device. The host waits for the device at captures only."""

    def __init__(self, device: torch.device):
        self.pool_bytes = 0
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._handle: Any = torch.cuda.graph_pool_handle()  # torch's name of the pool

    def warm_up(self, step: StaticStep) -> int:
        """A run on a side stream: libraries load kernels and take workspaces, which a capture must not."""
        torch.cuda.synchronize(self._device)
        reset_cuda_peak(self._device)  # the rollout's own peak is measured around this
        before = torch.cuda.memory_allocated(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            step()
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_allocated(self._device) - before)

    def capture(self, step: StaticStep) -> Captured:
        """One graph. Errors of other threads' CUDA calls (a trainer's, NCCL's watchdog) do not end the capture.

        Raises BackendError for a step that cannot be captured, torch.OutOfMemoryError.
        """
        # `torch.cuda.graph` empties the cache, too: that would free the warm-up's memory between the two measurements
        # and hide the memory of the capture.
        torch.cuda.empty_cache()
        free, reserved = self._free_bytes(), torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._handle, stream=self._stream, capture_error_mode="thread_local"):
                step()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            first = error.__context__ or error  # the end of a capture that failed fails, too
            raise BackendError(f"a CUDA graph: {first}; rollout.graph_memory_mib: 0 does without graphs") from error
        torch.cuda.synchronize(self._device)
        grown = max(0, int(torch.cuda.memory_reserved(self._device)) - int(reserved))
        self.pool_bytes += grown
        return Captured(graph.replay, max(0, free - self._free_bytes() - grown))

    def _free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])
