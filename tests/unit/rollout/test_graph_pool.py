"""Static forwards by bucket: they compute what ragged ones do, and keep to a memory budget."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from megatron_tlt.errors import BackendError
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.inputs import DecoderInput
from megatron_tlt.models.torch.decoder import TorchDecoder
from megatron_tlt.rollout.graph_capture import AgreedCapturer, Captured, CudaCapturer, GraphCache
from megatron_tlt.rollout.graph_pool import (
    GraphKey,
    GraphPool,
    PooledDecoder,
    PoolSizes,
    batch_buckets,
    round_up,
)
from megatron_tlt.types import SamplingParams
from tests.helpers.engines import make_engine, small_config
from tests.helpers.tiny_models import Driver, random_weights
from tests.helpers.trees import Tree, copy_of, random_tree, tree_input

CONFIG = ModelConfig("qwen2", 101, 64, 2, 6, 2, 16, 96, qkv_bias=True, max_position_embeddings=256)
SIZES = PoolSizes(max_batch=12, max_context=200, block_size=16, verify_rows=96)


def tokens(n: int, seed: int) -> list[int]:
    return torch.randint(0, 101, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


class Fake:
    """A capturer with given sizes: each step's temporary memory and each graph's own."""

    def __init__(self, temporary: dict[str, int] | int = 0, own: int = 0, unforeseen: int = 0):
        self.pool_bytes = 0
        self.temporary, self.own, self.unforeseen = temporary, own, unforeseen
        self.warmed = self.captured = self.pools_freed = 0
        self._needed = 0

    def warm_up(self, step) -> int:
        self.warmed += 1
        step()
        self._needed = self.temporary if isinstance(self.temporary, int) else self.temporary[step.__name__]
        return self._needed

    def capture(self, step):
        self.captured += 1
        self.pool_bytes = max(self.pool_bytes, self._needed + self.unforeseen)
        return Captured(step, self.own)

    def free_pool(self) -> None:
        self.pools_freed += 1
        self.pool_bytes = 0


@pytest.fixture
def setup():
    """A decoder whose states have two parts, a pool on a driver's cache, and sequences of unequal length in it."""
    decoder = TorchDecoder(CONFIG, aux_layers=(0,))
    decoder.load_weights(random_weights(CONFIG))
    driver = Driver(decoder, num_blocks=100)
    lengths = [0, 1, 16, 37, 5, 130, 64]
    driver.step([(s, tokens(n, s)) for s, n in enumerate(lengths) if n])
    for s, n in enumerate(lengths):
        table = driver.tables.setdefault(s, [])
        while len(table) * 16 < n + 20:
            table.append(driver.free.pop())
    return decoder, driver, lengths


def batch_of(driver: Driver, lengths: list[int], seqs: list[int], trees: list[Tree]) -> DecoderInput:
    return tree_input(trees, [lengths[s] for s in seqs], [driver.tables[s] for s in seqs])


def chain(ids: list[int]) -> Tree:
    return Tree(ids, list(range(-1, len(ids) - 1)))


def test_buckets() -> None:
    assert batch_buckets(1) == [1]
    assert batch_buckets(12) == [1, 2, 4, 8, 12]
    assert batch_buckets(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    large = batch_buckets(1000)
    assert large[-1] == 1000 and all(b <= a + max(8, a // 4) for a, b in pairwise(large))
    assert [round_up([2, 5, 9], n) for n in (0, 2, 3, 9, 10)] == [2, 2, 5, 9, None]


def test_the_static_forward_never_asks_for_a_value() -> None:
    """On the meta device there are none: whatever would wait for the device fails."""
    decoder = TorchDecoder(CONFIG, device="meta")
    decoder.load_weights(random_weights(CONFIG))
    rows = torch.zeros(12, dtype=torch.int32, device="meta")
    tables, none = torch.zeros(3, 5, dtype=torch.int32, device="meta"), rows[:3]
    for parents in (None, rows):
        batch = DecoderInput(rows, rows, rows, none, none, tables, none, parents)
        out = decoder.forward_static(batch, decoder.new_kv_cache(8, 16), 4)
        assert out.logits.shape == (12, 101) and out.hidden.shape == (12, 64)
    with pytest.raises((RuntimeError, NotImplementedError)):
        decoder.forward(batch, decoder.new_kv_cache(8, 16))


def test_invariant_numerics_have_no_static_forward(setup) -> None:
    _, driver, lengths = setup
    decoder = TorchDecoder(CONFIG, invariant=True)
    decoder.load_weights(random_weights(CONFIG))
    with pytest.raises(BackendError, match="invariant"):
        GraphPool(decoder, driver.kv, SIZES).run(batch_of(driver, lengths, [3], [chain([1])]), 1)


@pytest.mark.parametrize("seqs", [[3], [0, 1, 2], [5, 6, 0, 3, 1], [6, 5, 4, 3, 2, 1, 0]])
def test_plain_decoding_equals_the_ragged_forward(setup, seqs: list[int]) -> None:
    decoder, driver, lengths = setup
    pool = GraphPool(decoder, driver.kv, SIZES)
    batch = batch_of(driver, lengths, seqs, [chain([7 + s]) for s in seqs])
    batch.parents = None
    kv = copy_of(driver.kv)
    want = decoder.forward(batch, kv)
    got = pool.run(batch, 1)
    torch.testing.assert_close(got.logits, want.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.hidden, want.hidden, atol=1e-5, rtol=1e-5)
    used = driver.kv.num_blocks * 16  # all but the scratch block
    torch.testing.assert_close(driver.kv.data[:, :, :used], kv.data[:, :, :used], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", ["chains", "trees"])
def test_verification_equals_the_ragged_forward(setup, shape: str) -> None:
    """Sequences of 1 to 7 rows padded to 8, some wanted rows in any order, hidden states of all rows."""
    decoder, driver, lengths = setup
    pool, seqs, sizes = GraphPool(decoder, driver.kv, SIZES), [5, 0, 3, 1, 6], [7, 2, 1, 5, 3]
    trees = [
        chain(tokens(n, n)) if shape == "chains" else random_tree(n, 101, 10 + s)
        for s, n in zip(seqs, sizes, strict=True)
    ]
    batch = batch_of(driver, lengths, seqs, trees)
    if shape == "chains":
        batch.parents = None
    batch.all_hidden, batch.logit_rows = True, torch.tensor([17, 0, 3, 3, 9], dtype=torch.int32)
    want = decoder.forward(batch, copy_of(driver.kv))
    got = pool.run(batch, 7)
    torch.testing.assert_close(got.logits, want.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.hidden, want.hidden, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.all_hidden, want.all_hidden, atol=1e-5, rtol=1e-5)
    assert pool.captured == [GraphKey(8, 8, 13)]
    assert (pool.stats().rows, pool.stats().padded_rows) == (18, 64 - 18)


def test_a_replay_sees_the_new_inputs_and_leaves_old_results_alone(setup) -> None:
    """The same key with fewer sequences and other values: nothing of the first batch shines through."""
    decoder, driver, lengths = setup
    pool = GraphPool(decoder, driver.kv, SIZES, capturer=Fake())
    first = batch_of(driver, lengths, [5, 6, 3], [chain(tokens(4, 1)) for _ in range(3)])
    kept = pool.run(first, 4)
    logits = kept.logits.clone()
    second = batch_of(driver, lengths, [1, 2, 5], [random_tree(n, 101, n) for n in (2, 4, 1)])
    got = pool.run(second, 4)
    want = decoder.forward(second, copy_of(driver.kv))
    torch.testing.assert_close(got.logits, want.logits, atol=1e-5, rtol=1e-5)
    assert torch.equal(kept.logits, logits)
    assert pool.stats().captures == 1 and pool.stats().replays == 2


def test_a_graph_replayed_by_address_gives_the_same(setup) -> None:
    """A capturer that records the step's input and output memory, as CUDA does, and never calls the step again."""
    decoder, driver, lengths = setup

    class ByAddress(Fake):
        def capture(self, step):
            seen = []
            plain = decoder.forward_static

            def spy(batch, kv, rows_each, into=None):
                seen.append((batch, into, rows_each))
                return plain(batch, kv, rows_each, into)

            decoder.forward_static = spy
            step()
            decoder.forward_static = plain
            batch, into, rows_each = seen[0]
            return Captured(lambda: plain(batch, driver.kv, rows_each, into), 0)

    pool = GraphPool(decoder, driver.kv, SIZES, capturer=ByAddress())
    for seed in range(3):
        batch = batch_of(
            driver, lengths, [5, 3], [random_tree(4, 101, seed), chain(tokens(2 + seed % 2, seed))]
        )
        want = decoder.forward(batch, copy_of(driver.kv))
        torch.testing.assert_close(pool.run(batch, 4).logits, want.logits, atol=1e-5, rtol=1e-5)


def test_strategies_with_equally_many_tokens_share_graphs(setup) -> None:
    decoder, driver, lengths = setup
    fake = Fake()
    pool = GraphPool(decoder, driver.kv, SIZES, capturer=fake)
    for tree in (chain(tokens(6, 1)), random_tree(6, 101, 2), Tree(tokens(6, 3), [-1, 0, 0, 1, 1, 1])):
        pool.run(batch_of(driver, lengths, [3], [tree]), 6)
    assert fake.captured == 1
    pool.run(batch_of(driver, lengths, [3], [chain([1])]), 1)
    assert fake.captured == 2


def test_plain_decoding_has_a_graph_at_every_batch_size() -> None:
    """Up to the most running requests, also where verifying as many rows each would not fit."""
    decoder = TorchDecoder(CONFIG)
    sizes = PoolSizes(max_batch=300, max_context=64, block_size=16, verify_rows=64)
    pool = GraphPool(decoder, decoder.new_kv_cache(4, 16), sizes)
    for running in range(1, 301):
        key = pool.key(running, 1, 63)
        assert key is not None and running <= key.batch_size < running + max(8, running / 3)
    assert pool.key(300, 2, 10) is None and pool.key(8, 8, 10) == GraphKey(8, 8, 4)


def test_what_does_not_fit_the_buffers_runs_without_a_graph_and_is_counted(setup) -> None:
    decoder, driver, lengths = setup
    pool = GraphPool(decoder, driver.kv, PoolSizes(4, 200, 16, verify_rows=8))
    batch = batch_of(driver, lengths, [5, 3], [random_tree(6, 101, 1), chain(tokens(5, 5))])
    want = decoder.forward(batch, copy_of(driver.kv))
    torch.testing.assert_close(pool.run(batch, 6).logits, want.logits, atol=1e-5, rtol=1e-5)
    assert pool.stats().eager_too_large == 1 and not pool.captured


def test_an_engine_over_a_pool_gives_the_same_answers() -> None:
    """Forks, prefill chunks and decoding of a real engine, every batch through static buffers that hold it."""
    weights = random_weights(small_config("qwen2"))
    prompts = [(i, tokens(5 + 37 * i, i), SamplingParams(max_tokens=20, seed=3), 3) for i in range(4)]
    answers = []
    for is_pooled in (False, True):
        engine = make_engine(small_config("qwen2"), weights, kernels="torch")
        if is_pooled:
            runner = engine.runner
            runner.decoder = PooledDecoder(runner.decoder, runner.kv, PoolSizes(16, 256, 16, verify_rows=512))
        for prompt_id, ids, params, samples in prompts:
            engine.add(ids, params, prompt_id, num_samples=samples)
        answers.append([(r.prompt_id, r.sample_index, r.output) for r in engine.run()])
        if is_pooled:
            stats = runner.decoder.pool.stats()
            assert stats.replays > 15 and stats.eager_too_large > 0
    assert answers[0] == answers[1]


def test_a_drafters_steps_share_pool_and_budget(setup) -> None:
    decoder, driver, _ = setup
    fake = Fake(temporary=500)
    pool, ran = GraphPool(decoder, driver.kv, SIZES, capturer=fake), []
    for n in (3, 4, 9):
        pool.run_step(("draft", round_up([4, 12], n)), lambda: ran.append(1))
    assert pool.captured == [("draft", 4), ("draft", 12)]
    assert fake.captured == 2 and fake.pool_bytes == 500 and len(ran) == fake.warmed + 3


# The budget.


def steps(*names: str):
    """Functions of these names, and the list of those that ran."""
    ran: list[str] = []
    made = {}
    for name in names:
        step = lambda name=name: ran.append(name)  # noqa: E731
        step.__name__ = name
        made[name] = step
    return made, ran


def test_graphs_share_the_pool_and_the_oldest_goes_first() -> None:
    made, ran = steps("a", "b", "c")
    fake = Fake(temporary=100, own=30)
    cache = GraphCache(fake, budget_bytes=50 + 100 + 70, fixed_bytes=50)
    for name in "aba":
        cache.run(name, made[name])
    assert cache.keys == ["b", "a"] and cache.memory_bytes == 50 + 100 + 60
    cache.run("c", made["c"])  # 90 of their own do not fit: b was used longest ago
    assert cache.keys == ["a", "c"] and cache.stats.evictions == 1
    cache.run("b", made["b"])  # captured anew
    assert cache.keys == ["c", "b"] and cache.stats.captures == 4
    assert cache.memory_bytes <= 220 and cache.stats.eager_over_budget == 0
    assert ran.count("a") == 1 + 2 and cache.stats.replays == 5


def test_a_step_that_cannot_fit_evicts_no_graph_and_runs_eagerly() -> None:
    made, ran = steps("small", "huge")
    fake = Fake(temporary={"small": 10, "huge": 1000}, own=1)
    cache = GraphCache(fake, budget_bytes=200)
    cache.run("small", made["small"])
    for _ in range(3):
        cache.run("huge", made["huge"])
    assert cache.keys == ["small"] and fake.captured == 1 and fake.warmed == 2
    assert ran.count("huge") == 1 + 3 and cache.stats.eager_over_budget == 3 and cache.stats.refused == 1


def test_a_capture_that_took_more_than_foreseen_is_given_back() -> None:
    made, ran = steps("a")
    fake = Fake(temporary=100, own=10, unforeseen=500)
    cache = GraphCache(fake, budget_bytes=300)
    cache.run("a", made["a"])
    assert cache.keys == [] and cache.memory_bytes == 0 and fake.pools_freed == 1
    assert cache.stats.eager_over_budget == 1 and ran.count("a") == 2  # warm-up and the eager run


def test_ranks_whose_allocators_differ_capture_and_drop_the_same_graphs() -> None:
    """Two ranks in threads; alone, the second would refuse "huge" and drop others."""
    barrier, given = threading.Barrier(2, timeout=20), [0, 0]

    def largest(rank: int, value: int) -> int:
        given[rank] = value
        barrier.wait()
        found = max(given)
        barrier.wait()
        return found

    names = ("a", "b", "huge", "c", "a", "d", "b", "huge", "a")

    def one_rank(rank: int) -> list[object]:
        made, _ = steps(*set(names))
        sizes = {"a": 10 + 60 * rank, "b": 90 - 50 * rank, "c": 40, "d": 100, "huge": 150 + 300 * rank}
        fake = Fake(temporary=sizes, own=20 + 25 * rank)
        cache = GraphCache(AgreedCapturer(fake, partial(largest, rank)), budget_bytes=240)
        seen: list[object] = []
        for name in names:
            cache.run(name, made[name])
            seen.append((tuple(cache.keys), cache.memory_bytes))
        cache.clear()
        return [*seen, cache.memory_bytes, cache.stats.refused, cache.stats.evictions]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(one_rank, (0, 1))
    assert first == second
    assert first[-1] > 0, "nothing was dropped"


class FakeCuda:
    """As much of torch.cuda as a capture needs: a device of 1000 bytes, an allocator, private pools."""

    def __init__(self):
        self.free, self.reserved, self.allocated, self.peak, self.handles = 1000, 0, 0, 0, 0
        self.capturing, self.pools_used = False, []

    def use(self, needed: int, own: int):
        """A step that takes `needed` temporary bytes; capturing it costs `own` more."""

        def step() -> None:
            self.peak = max(self.peak, self.allocated + needed)
            if self.capturing:
                grown = max(0, needed - self.reserved)
                self.reserved += grown
                self.free -= grown + own

        return step

    @contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"
        self.pools_used.append(pool)
        self.capturing = True
        yield
        self.capturing = False

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
            "empty_cache": lambda: None,
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
    cache.run("a", cuda.use(100, own=10))
    cache.run("b", cuda.use(250, own=20))
    cache.run("c", cuda.use(50, own=5))
    assert capturer.pool_bytes == 250 and cache.memory_bytes == 250 + 35
    assert set(cuda.pools_used) == {1} and 1000 - cuda.free == 285
    cache.run("d", cuda.use(500, own=1))  # would not fit even alone
    assert cache.stats.eager_over_budget == 1 and len(cuda.pools_used) == 3
    cache.clear()
    cuda.reserved, cuda.free = 0, 1000
    cache.run("a", cuda.use(100, own=10))
    assert cuda.pools_used[-1] == 2 and cache.memory_bytes == 110
