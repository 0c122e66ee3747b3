"""Static forwards by bucket: they compute what ragged ones do, and keep to a memory budget."""

from __future__ import annotations

import weakref
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from megatron_tlt.backends.embedded import EmbeddedBackend
from megatron_tlt.config.load import build_config
from megatron_tlt.config.planning.engine import row_bytes
from megatron_tlt.config.planning.graphs import batch_buckets, captured_shapes, graph_rows, least_graph_bytes, round_up
from megatron_tlt.distributed import world
from megatron_tlt.errors import BackendError
from megatron_tlt.models.decoders import base
from megatron_tlt.models.decoders.base import KVCache
from megatron_tlt.models.decoders.inputs import DecoderInput
from megatron_tlt.models.decoders.torch.decoder import TorchDecoder
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.rollout.engine import Engine
from megatron_tlt.rollout.graph_capture import Captured
from megatron_tlt.rollout.graph_pool import GraphKey, GraphPool, PoolSizes
from megatron_tlt.sync.served_weights import ServedWeights
from megatron_tlt.types import SamplingParams
from tests.helpers.driver_memory import HostMemory, build_driver
from tests.helpers.engines import SizedCapturer, make_engine, small_config
from tests.helpers.memory import MetaMemory
from tests.helpers.stepping import run_out
from tests.helpers.tiny_models import Driver, copy_of, random_weights, rows_input

CONFIG = ModelConfig("qwen2", 101, 64, 2, 6, 2, 16, 96, qkv_bias=True, max_position_embeddings=256)
SIZES = PoolSizes(max_batch=12, max_context=200, block_size=16, verify_rows=96)


def tokens(n: int, seed: int) -> list[int]:
    return torch.randint(0, 101, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


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


def batch_of(driver: Driver, lengths: list[int], seqs: list[int], rows: list[list[int]]) -> DecoderInput:
    return rows_input(rows, [lengths[s] for s in seqs], [driver.tables[s] for s in seqs])


def test_buckets() -> None:
    assert batch_buckets(1) == [1]
    assert batch_buckets(12) == [1, 2, 4, 8, 12]
    assert batch_buckets(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    large = batch_buckets(1000)
    assert large[-1] == 1000 and all(b <= a + max(8, a // 4) for a, b in pairwise(large))
    assert [round_up([2, 5, 9], n) for n in (0, 2, 3, 9, 10)] == [2, 2, 5, 9, None]


def test_wider_states_and_routed_experts_take_what_the_plan_counts() -> None:
    """Buffers of a pool, and what one forward has beside them, with hidden states of kind eagle3 and with experts."""
    dense, h = ModelConfig("llama", 101, 64, 6, 4, 2, 16, 512), 64
    sparse = replace(dense, family="qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=96)
    sparse = replace(sparse, moe_layers=tuple(range(6)))
    wanted = ["rollout.dtype=bf16", "rollout.max_running_requests=8"]
    wanted += ["rollout.speculation.drafter_path=d"]
    rows = graph_rows(build_config({"model": {"path": "m"}}, [*wanted, "rollout.speculation.drafter=eagle"]))
    sizes = PoolSizes(max_batch=8, max_context=96, block_size=16, verify_rows=rows)

    def taken(shape: ModelConfig, kind: str, layers: tuple[int, ...]) -> tuple[int, int]:
        config = build_config({"model": {"path": "m"}}, [*wanted, f"rollout.speculation.drafter={kind}"])
        with MetaMemory() as memory:
            decoder = TorchDecoder(shape, dtype=torch.bfloat16, device="meta", aux_layers=layers)
            decoder.paged = lambda q, *_: torch.empty_like(q)
            pool = GraphPool(decoder, decoder.new_kv_cache(8, 16), sizes)
            fixed = pool.graphs.memory_bytes - pool._staging.nbytes
            key = GraphKey(8, rows // 8)
            memory.reset_peak()
            before = memory.live
            pool._step(key, pool._staging.blank(key))()
            step = memory.peak - before
        assert fixed + rows * row_bytes(config, shape) == least_graph_bytes(config, shape)
        return step, rows * row_bytes(config, shape)

    (plain, planned), (wide, planned_wide) = taken(dense, "eagle", ()), taken(dense, "eagle3", (1, 2, 4))
    assert wide - plain == planned_wide - planned == rows * 3 * h * 2
    taken(sparse, "eagle3", (1, 2, 4))


def test_invariant_numerics_have_no_static_forward(setup) -> None:
    _, driver, lengths = setup
    decoder = TorchDecoder(CONFIG, invariant=True)
    decoder.load_weights(random_weights(CONFIG))
    with pytest.raises(BackendError, match="invariant"):
        GraphPool(decoder, driver.kv, SIZES).run(batch_of(driver, lengths, [3], [[1]]))


class ByAddress(SizedCapturer):
    """Records the memory that a step reads and writes, as CUDA does, and never calls the step again."""

    def __init__(self, decoder: TorchDecoder):
        super().__init__()
        self.decoder = decoder

    def capture(self, step):
        seen = []
        plain = TorchDecoder.forward_static

        def spy(batch, kv, rows_each, into=None):
            seen.append((batch, kv.data, into, rows_each))
            return plain(self.decoder, batch, kv, rows_each, into)

        self.decoder.forward_static = spy
        step()
        del self.decoder.forward_static
        self.captured += 1
        batch, cache, into, rows_each = seen[0]
        kv = KVCache(cache.shape[2] // 16 - 1, 16, cache)
        return Captured(lambda: plain(self.decoder, batch, kv, rows_each, into), 0)


# Sequences and the rows of each, in one pool: plain decoding, verification, fewer sequences with the same key. 5 and 6
# rows share a graph, 7 have none.
BATCHES = [
    ([3], [1]),
    ([0, 1, 2], [1, 1, 1]),
    ([6, 5, 4, 3, 2, 1, 0], [1] * 7),
    ([5, 6, 3], [4, 4, 4]),
    ([1, 2, 5], [2, 4, 1]),
    ([3], [5]),
    ([3], [6]),
    ([5, 0, 3, 1, 6], [7, 2, 1, 5, 3]),
]


@pytest.mark.parametrize("is_captured", [False, True])
def test_static_forwards_equal_ragged_ones(setup, is_captured: bool) -> None:
    """Logits of wanted rows in any order, hidden states and cache. No batch sees the ones before it or changes their
    results.
    """
    decoder, driver, lengths = setup
    pool, before = GraphPool(decoder, driver.kv, SIZES, capturer=ByAddress(decoder)), copy_of(driver.kv)
    used = driver.kv.num_blocks * 16  # all but the scratch block
    if is_captured:
        pool.capture(6)
        assert torch.equal(driver.kv.data[:, :, :used], before.data[:, :, :used]), "captures write to scratch only"
        shapes = {(k.batch_size, k.tokens) for k in pool.graphs.keys}
        assert shapes == {(b, k) for b in (1, 2, 4, 8, 12) for k in (1, 2, 3, 4, 6)}
        assert pool.graphs.keys[0] == GraphKey(12, 6), "the largest makes the shared memory"
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for seed, (seqs, counts) in enumerate(BATCHES):
        batch = batch_of(driver, lengths, seqs, [tokens(n, seed + n) for n in counts])
        batch.all_hidden, batch.logit_rows = True, batch.logit_rows.flip(0)
        kv = copy_of(driver.kv)
        want, got = decoder.forward(batch, kv), pool.run(batch)
        for a, b in ((got.logits, want.logits), (got.hidden, want.hidden)):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        assert torch.equal(got.slots, batch.slot_mapping), "where hidden states go, without another copy"
        torch.testing.assert_close(driver.kv.data[:, :, :used], kv.data[:, :, :used], atol=1e-5, rtol=1e-5)
        kept.append((got.logits, got.logits.clone()))
    assert all(torch.equal(*pair) for pair in kept)
    replays = len(BATCHES) - 1 if is_captured else 0
    assert (pool.graphs.stats.replays, pool.graphs.stats.eager) == (replays, len(BATCHES) - replays)


def responses_of(engine: Engine, turn: int) -> list[tuple]:
    """Forks, prefill chunks and decoding of four prompts."""
    for i in range(4):
        params = SamplingParams(max_tokens=20, seed=3 + turn)
        engine.add(tokens(5 + 37 * i, i + turn), params, i, indices=range(3))
    return [(r.prompt_id, r.sample_index, r.output) for r in run_out(engine)]


def test_an_engine_over_a_pool_gives_the_same_responses(tmp_path, monkeypatch) -> None:
    """Also one whose cache is released and keeps its address: no capture after the start."""
    weights, driver, responses = random_weights(small_config("qwen2")), build_driver(tmp_path), []
    monkeypatch.setattr(base, "FixedMemory", lambda size, device: HostMemory(driver, size))
    for way in ("ragged", "pooled", "released"):
        engine = make_engine(small_config("qwen2"), weights, kernels="torch")
        runner = engine.runner
        capturer = ByAddress(runner.decoder)
        if way != "ragged":
            sizes = PoolSizes(16, 256, 16, verify_rows=512)
            runner.pool = GraphPool(runner.decoder, runner.kv, sizes, capturer=capturer)
            engine.capture_graphs(1, keep_address=way == "released")
        captured = capturer.captured
        for turn in range(2):
            if way == "released":
                engine.release()
                assert runner.kv.is_released
                engine.resume()
            assert not runner.kv.is_released
            responses.append(responses_of(engine, turn))
        assert capturer.captured == captured
        if runner.pool is not None:
            assert captured >= 5 and runner.pool.graphs.stats.replays > 30
            assert runner.pool.graphs.stats.eager == 0
    assert responses[:2] == responses[2:4] == responses[4:]


def test_steps_without_a_graph_are_named_and_counted(caplog) -> None:
    """Of those that an engine captures, where the budget has room for some; and which ran in a rollout."""
    engine = make_engine(small_config("qwen2"), random_weights(small_config("qwen2")), kernels="torch")
    runner, sizes = engine.runner, PoolSizes(16, 256, 16, 64)
    fixed = GraphPool(runner.decoder, runner.kv, sizes).graphs.memory_bytes
    refused = "2 of 5 steps have a CUDA graph, in 2 of 3 MiB; the others run without, slower: rollout.graph_memory_mib"
    for own, line in ((0, ("INFO", "5 of 5 steps have a CUDA graph, in 0 of 3 MiB")), (1 << 20, ("WARNING", refused))):
        budget = fixed + (5 << 19)  # two and a half
        runner.pool = GraphPool(runner.decoder, runner.kv, sizes, budget, SizedCapturer(own=own))
        caplog.clear()
        with caplog.at_level("INFO", "megatron_tlt"):
            engine.capture_graphs(1)
        assert [(record.levelname, record.getMessage()) for record in caplog.records] == [line]
        responses_of(engine, turn=0)
        stats = engine.take_stats()
        assert stats.graph_replays > 0 and (stats.graph_misses > 0) == bool(own)
    assert (engine.take_stats().graph_replays, engine.take_stats().graph_misses) == (0, 0)


def test_graphs_are_gone_before_the_groups_whose_collectives_they_hold(monkeypatch) -> None:
    """Also of an engine with other references to it, and where a command ends early."""
    ends = []
    monkeypatch.setattr(world.dist, "barrier", lambda: None)
    for end in ("close", "release"):
        rank = world.World(0, 1, 0, 1, torch.device("cpu"), 1.0, store=None, comm=None)
        engine = make_engine(small_config("qwen2"), random_weights(small_config("qwen2")), kernels="torch")
        runner, graphs = engine.runner, weakref.WeakSet()

        class Graphs(SizedCapturer):
            def capture(self, step):
                captured = super().capture(step)
                graphs.add(captured.replay)  # noqa: B023
                return captured

        runner.pool = GraphPool(runner.decoder, runner.kv, PoolSizes(16, 256, 16, 64), capturer=Graphs())
        engine.capture_graphs(1)
        assert len(graphs) >= 5
        rank.at_close(EmbeddedBackend(engine, ServedWeights({}, version=0)).close)
        destroy = lambda: ends.append(len(graphs))  # noqa: B023, E731
        monkeypatch.setattr(world.dist, "destroy_process_group", destroy)
        getattr(rank, end)()
        ends.append(len(graphs))
    assert ends == [0] * 3


def test_keys_are_the_buckets_that_fit_the_buffers() -> None:
    """Plain decoding has one at every batch size, also where verifying as many rows each would not fit."""
    decoder = TorchDecoder(CONFIG)
    pools = {
        most: GraphPool(decoder, decoder.new_kv_cache(4, 16), PoolSizes(most, 64, 16, verify_rows))
        for most, verify_rows in ((300, 64), (4, 8))
    }
    for running in range(1, 301):
        key = pools[300].key(running, 1)
        assert key is not None and running <= key.batch_size < running + max(8, running / 3)
    assert pools[300].key(300, 2) is None and pools[300].key(8, 8) == GraphKey(8, 8)
    assert pools[4].key(2, 4) == GraphKey(2, 4)
    assert pools[4].key(2, 5) is None and pools[4].key(5, 1) is None


def test_a_drafters_steps_share_pool_and_budget(setup) -> None:
    decoder, driver, _ = setup
    fake = SizedCapturer(temporary=500)
    pool, ran = GraphPool(decoder, driver.kv, SIZES, capturer=fake), []
    pool.capture(1, [(("draft", n), lambda: ran.append(1)) for n in (12, 4)])
    assert pool.graphs.keys[1:3] == [("draft", 12), ("draft", 4)], "behind the largest forward"
    for n in (3, 4, 9):
        pool.graphs.run(("draft", round_up([4, 12], n)), lambda: ran.append(1))
    assert fake.pool_bytes == 500 and len(ran) == 2 + 3 and pool.graphs.stats.eager == 0


def test_shapes_are_the_largest_and_then_from_the_smallest_on() -> None:
    shapes = captured_shapes(max_batch=16, max_rows=40, rows_each=5)
    assert shapes[:4] == [(16, 2), (1, 1), (1, 2), (2, 1)]
    assert {k for _, k in shapes} == {1, 2, 3, 4, 6} and all(b * k <= 40 for b, k in shapes)
    assert len(set(shapes)) == len(shapes) and (16, 2) in shapes and (16, 3) not in shapes
