"""Captured steps keep to a memory budget, on all ranks alike."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from megatron_tlt.errors import BackendError
from megatron_tlt.rollout.graph_capture import CudaCapturer, GraphCache
from tests.helpers.engines import SizedCapturer
from tests.helpers.thread_ranks import ThreadRank, on_ranks


def steps(*names: str):
    """Functions of these names, and the list of those that ran."""
    ran: list[str] = []
    made = {}
    for name in names:
        step = lambda name=name: ran.append(name)  # noqa: E731
        step.__name__ = name
        made[name] = step
    return made, ran


@pytest.mark.parametrize(
    ("names", "sizes", "budget", "captured", "nbytes"),
    [
        ("a b c", {"temporary": 100, "own": 30}, 50 + 100 + 70, "a b", 50 + 100 + 60),  # they share the pool
        ("huge small", {"temporary": {"small": 10, "huge": 1000}, "own": 1}, 250, "small", 50 + 11),
        ("a", {"temporary": 100, "own": 400}, 350, "", 50 + 100),  # own memory was not foreseen; the pool stays
    ],
)
def test_steps_are_captured_while_the_budget_has_room_and_else_run_as_they_are(
    names: str, sizes: dict, budget: int, captured: str, nbytes: int
) -> None:
    made, ran = steps(*names.split())
    cache = GraphCache(SizedCapturer(**sizes), budget_bytes=budget, fixed_bytes=50)
    kept = [name for name in made if cache.capture(name, made[name])]
    assert kept == cache.keys == captured.split() and cache.memory_bytes == nbytes
    ran.clear()
    for name in made:
        cache.run(name, made[name])
    assert ran == names.split()
    refused = len(made) - len(kept)
    assert (cache.stats.replays, cache.stats.eager, cache.stats.refused) == (len(kept), refused, refused)


def test_ranks_whose_allocators_differ_capture_the_same_graphs() -> None:
    """Two ranks in threads; alone, they would refuse different ones."""
    names = ("a", "b", "huge", "c", "d", "e")

    def one_rank(tp: ThreadRank, agreed: bool = True) -> list[object]:
        made, _ = steps(*names)
        rank = tp.rank
        sizes = {"a": 10 + 60 * rank, "b": 90 - 50 * rank, "c": 40, "d": 100, "huge": 150 + 300 * rank, "e": 5}
        fake = SizedCapturer(temporary=sizes, own=20 + 25 * rank)
        cache = GraphCache(fake, budget_bytes=270, tp=tp if agreed else None)
        for name in names:
            cache.capture(name, made[name])
        return [*cache.keys, cache.memory_bytes, cache.stats.refused]

    first, second = on_ranks(2, one_rank)
    assert first == second and first[-1] > 0
    first, second = on_ranks(2, lambda tp: one_rank(tp, agreed=False))
    assert first != second


class FakeCuda:
    """As much of torch.cuda as a capture needs: a device of 1000 bytes, an allocator, private pools."""

    def __init__(self):
        self.free, self.reserved, self.allocated, self.peak, self.handles = 1000, 0, 0, 0, 0
        self.cached = self.pool = 0  # of what is reserved: free for other tensors, and the graphs'
        self.capturing, self.pools_used = False, []

    def use(self, needed: int, own: int):
        """A step that takes `needed` temporary bytes; capturing it costs `own` more."""

        def step() -> None:
            self.peak = max(self.peak, self.allocated + needed)
            grown = max(0, needed - (self.pool if self.capturing else self.cached))
            self._reserve(grown)
            if self.capturing:
                self.pool += grown
                self.free -= own
            else:
                self.cached += grown  # freed at the step's end, but kept

        return step

    @contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"
        self.pools_used.append(pool)
        self.empty_cache()  # as torch's does
        self.capturing = True
        yield
        self.capturing = False

    def _reserve(self, nbytes: int) -> None:
        self.reserved += nbytes
        self.free -= nbytes

    def empty_cache(self) -> None:
        self._reserve(-self.cached)
        self.cached = 0

    def install(self, monkeypatch) -> None:
        def handle() -> int:
            self.handles += 1
            return self.handles

        def reset(device) -> None:
            self.peak = self.allocated

        stream = SimpleNamespace(wait_stream=lambda other: None)
        fakes = {
            "Stream": lambda device: stream,
            "stream": lambda chosen: nullcontext(),
            "current_stream": lambda device: stream,
            "synchronize": lambda device: None,
            "empty_cache": self.empty_cache,
            "reset_peak_memory_stats": reset,
            "memory_allocated": lambda device: self.allocated,
            "max_memory_allocated": lambda device: self.peak,
            "memory_reserved": lambda device: self.reserved,
            "mem_get_info": lambda device: (self.free, 1000),
            "graph_pool_handle": handle,
            "graph": self.graph,
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)


def test_the_cuda_capturer_separates_shared_and_own_memory(monkeypatch) -> None:
    """Against a stand-in for torch.cuda: what it adds up and in which pool, not that CUDA works."""
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    capturer = CudaCapturer(torch.device("cuda", 0))
    cache = GraphCache(capturer, budget_bytes=400)
    cache.capture("a", cuda.use(100, own=10))
    cache.capture("b", cuda.use(250, own=20))
    cache.capture("c", cuda.use(50, own=5))
    assert capturer.pool_bytes == 250 and cache.memory_bytes == 250 + 35
    assert set(cuda.pools_used) == {1} and 1000 - cuda.free == 285
    assert not cache.capture("d", cuda.use(500, own=1)), "would not fit even alone"
    assert len(cuda.pools_used) == 3


@pytest.mark.parametrize(("raised", "is_of_memory"), [(RuntimeError, False), (torch.OutOfMemoryError, True)])
def test_a_step_that_cannot_be_captured_names_the_setting_that_does_without(monkeypatch, raised, is_of_memory) -> None:
    """The first error: the end of a capture that failed fails with another."""
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    step = cuda.use(100, own=10)

    @contextmanager
    def graph(graph, **_):
        try:
            yield
        finally:
            if not is_of_memory:
                raise RuntimeError("capture failed due to a previous error")

    def fails() -> None:
        raise raised("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    capturer = CudaCapturer(torch.device("cuda", 0))
    capturer.warm_up(step)
    expected = torch.OutOfMemoryError if is_of_memory else BackendError
    with pytest.raises(
        expected, match="not permitted" + "" if is_of_memory else r"not permitted.*rollout\.graph_memory_mib"
    ):
        capturer.capture(fails)
