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
from megatron_tlt.config.planning.graphs import (
    batch_buckets,
    captured_shapes,
    graph_rows,
    least_graph_bytes,
    round_up,
)
from megatron_tlt.distributed import world
from megatron_tlt.errors import BackendError
from megatron_tlt.models import base
from megatron_tlt.models.base import KVCache
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.inputs import DecoderInput
from megatron_tlt.models.torch.decoder import TorchDecoder
from megatron_tlt.rollout.graph_capture import Captured
from megatron_tlt.rollout.graph_pool import GraphKey, GraphPool, PoolSizes
from megatron_tlt.sync.served_weights import ServedWeights
from megatron_tlt.types import SamplingParams
from tests.helpers.batches import copy_of, rows_input
from tests.helpers.driver_memory import HostMemory, build_driver
from tests.helpers.engines import make_engine, small_config
from tests.helpers.graphs import Fake
from tests.helpers.ledger import Ledger
from tests.helpers.tiny_models import Driver, random_weights

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
        with Ledger(1 << 40) as ledger:
            decoder = TorchDecoder(shape, dtype=torch.bfloat16, device="meta", aux_layers=layers)
            decoder.paged = lambda q, *_: torch.empty_like(q)
            pool = GraphPool(decoder, decoder.new_kv_cache(8, 16), sizes)
            fixed = pool.graphs.memory_bytes - pool._staging.nbytes
            key = GraphKey(8, rows // 8)
            ledger.phase("forward")
            before = ledger.live
            pool._step(key, pool._staging.blank(key, 8, 16))()
            step = ledger.peak - before
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


@pytest.mark.parametrize("seqs", [[3], [0, 1, 2], [5, 6, 0, 3, 1], [6, 5, 4, 3, 2, 1, 0]])
def test_plain_decoding_equals_the_ragged_forward(setup, seqs: list[int]) -> None:
    decoder, driver, lengths = setup
    pool = GraphPool(decoder, driver.kv, SIZES)
    batch = batch_of(driver, lengths, seqs, [[7 + s] for s in seqs])
    batch.all_hidden = True
    kv = copy_of(driver.kv)
    want = decoder.forward(batch, kv)
    got = pool.run(batch)
    torch.testing.assert_close(got.logits, want.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.hidden, want.hidden, atol=1e-5, rtol=1e-5)
    used = driver.kv.num_blocks * 16  # all but the scratch block
    torch.testing.assert_close(driver.kv.data[:, :, :used], kv.data[:, :, :used], atol=1e-5, rtol=1e-5)


def test_verification_equals_the_ragged_forward(setup) -> None:
    """Sequences of 1 to 7 rows padded to 8, some wanted rows in any order, hidden states of all rows."""
    decoder, driver, lengths = setup
    pool, seqs, sizes = GraphPool(decoder, driver.kv, SIZES), [5, 0, 3, 1, 6], [7, 2, 1, 5, 3]
    batch = batch_of(driver, lengths, seqs, [tokens(n, n) for n in sizes])
    batch.all_hidden, batch.logit_rows = True, torch.tensor([17, 0, 3, 3, 9], dtype=torch.int32)
    want = decoder.forward(batch, copy_of(driver.kv))
    got = pool.run(batch)
    torch.testing.assert_close(got.logits, want.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.hidden, want.hidden, atol=1e-5, rtol=1e-5)
    assert pool.graphs.stats.eager == 1, "nothing is captured while requests run"


def test_a_replay_sees_the_new_inputs_and_leaves_old_results_alone(setup) -> None:
    """The same key with fewer sequences and other values: nothing of the first batch shines through."""
    decoder, driver, lengths = setup
    pool = GraphPool(decoder, driver.kv, SIZES, capturer=Fake())
    pool.capture(4)
    first = batch_of(driver, lengths, [5, 6, 3], [tokens(4, 1) for _ in range(3)])
    kept = pool.run(first)
    logits = kept.logits.clone()
    second = batch_of(driver, lengths, [1, 2, 5], [tokens(n, n) for n in (2, 4, 1)])
    got = pool.run(second)
    want = decoder.forward(second, copy_of(driver.kv))
    torch.testing.assert_close(got.logits, want.logits, atol=1e-5, rtol=1e-5)
    assert torch.equal(kept.logits, logits)
    assert pool.graphs.stats.eager == 0 and pool.graphs.stats.replays == 2


class ByAddress(Fake):
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


def test_graphs_captured_at_the_start_give_what_ragged_forwards_do(setup) -> None:
    decoder, driver, lengths = setup
    pool, before = GraphPool(decoder, driver.kv, SIZES, capturer=ByAddress(decoder)), copy_of(driver.kv)
    pool.capture(4)
    used = driver.kv.num_blocks * 16
    assert torch.equal(driver.kv.data[:, :, :used], before.data[:, :, :used]), "captures write to scratch only"
    shapes = {(k.batch_size, k.tokens) for k in pool.graphs.keys}
    assert shapes == {(b, k) for b in (1, 2, 4, 8, 12) for k in (1, 2, 3, 4)}
    assert pool.graphs.keys[0] == GraphKey(12, 4), "the largest makes the shared memory"
    for seed in range(3):
        batch = batch_of(driver, lengths, [5, 3], [tokens(4, seed), tokens(2 + seed % 2, seed)])
        want = decoder.forward(batch, copy_of(driver.kv))
        torch.testing.assert_close(pool.run(batch).logits, want.logits, atol=1e-5, rtol=1e-5)
    assert pool.graphs.stats.replays == 3 and pool.graphs.stats.eager == 0


def test_graphs_stay_through_a_release_of_the_cache(tmp_path, monkeypatch) -> None:
    """An engine whose caches keep their address: no capture after the start, the same responses."""
    weights, driver, responses = random_weights(small_config("qwen2")), build_driver(tmp_path), []
    monkeypatch.setattr(base, "FixedMemory", lambda size, device: HostMemory(driver, size))
    for is_fixed in (False, True):
        engine = make_engine(small_config("qwen2"), weights, kernels="torch")
        runner = engine.runner
        capturer = ByAddress(runner.decoder)
        sizes = PoolSizes(16, 256, 16, verify_rows=512)
        runner.pool = GraphPool(runner.decoder, runner.kv, sizes, capturer=capturer)
        engine.capture_graphs(1, keep_address=is_fixed)
        captured = capturer.captured
        assert captured >= 5
        for turn in range(3):
            if is_fixed:
                engine.release()
                assert runner.kv.is_released
                engine.resume()
            assert not runner.kv.is_released
            engine.add(tokens(20 + turn, turn), SamplingParams(max_tokens=20, seed=3), turn, num_samples=3)
            responses.append([(r.prompt_id, r.sample_index, r.output) for r in engine.run()])
        assert capturer.captured == captured and runner.pool.graphs.stats.replays > 20
    assert responses[:3] == responses[3:]


def test_graphs_are_gone_before_the_groups_whose_collectives_they_hold(monkeypatch) -> None:
    """Also of an engine that somebody still holds, and where a command ends early."""
    ends = []
    monkeypatch.setattr(world.dist, "barrier", lambda: None)
    for end in ("close", "release"):
        rank = world.World(0, 1, 0, 1, torch.device("cpu"), 1.0, store=None, comm=None)
        engine = make_engine(small_config("qwen2"), random_weights(small_config("qwen2")), kernels="torch")
        runner, graphs = engine.runner, weakref.WeakSet()

        class Graphs(Fake):
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


def test_strategies_with_equally_many_tokens_share_graphs(setup) -> None:
    decoder, driver, lengths = setup
    pool = GraphPool(decoder, driver.kv, SIZES, capturer=Fake())
    pool.capture(6)
    for rows in (5, 6):
        pool.run(batch_of(driver, lengths, [3], [tokens(rows, 1)]))
    assert pool.graphs.stats.replays == 2
    pool.run(batch_of(driver, lengths, [3], [tokens(8, 1)]))
    assert pool.graphs.stats.eager == 1, "longer than any draft"


def test_plain_decoding_has_a_graph_at_every_batch_size() -> None:
    """Up to the most running requests, also where verifying as many rows each would not fit."""
    decoder = TorchDecoder(CONFIG)
    sizes = PoolSizes(max_batch=300, max_context=64, block_size=16, verify_rows=64)
    pool = GraphPool(decoder, decoder.new_kv_cache(4, 16), sizes)
    for running in range(1, 301):
        key = pool.key(running, 1)
        assert key is not None and running <= key.batch_size < running + max(8, running / 3)
    assert pool.key(300, 2) is None and pool.key(8, 8) == GraphKey(8, 8)


def test_what_does_not_fit_the_buffers_has_no_key(setup) -> None:
    decoder, driver, _ = setup
    pool = GraphPool(decoder, driver.kv, PoolSizes(4, 200, 16, verify_rows=8))
    assert pool.key(2, 4) == GraphKey(2, 4) and pool.key(2, 5) is None and pool.key(5, 1) is None


def test_an_engine_over_a_pool_gives_the_same_responses() -> None:
    """Forks, prefill chunks and decoding of a real engine, every decoding step through static buffers."""
    weights = random_weights(small_config("qwen2"))
    prompts = [(i, tokens(5 + 37 * i, i), SamplingParams(max_tokens=20, seed=3), 3) for i in range(4)]
    responses = []
    for is_pooled in (False, True):
        engine = make_engine(small_config("qwen2"), weights, kernels="torch")
        if is_pooled:
            runner = engine.runner
            runner.pool = GraphPool(runner.decoder, runner.kv, PoolSizes(16, 256, 16, verify_rows=512))
            engine.capture_graphs(1)
        for prompt_id, ids, params, samples in prompts:
            engine.add(ids, params, prompt_id, num_samples=samples)
        responses.append([(r.prompt_id, r.sample_index, r.output) for r in engine.run()])
        if is_pooled:
            stats = runner.pool.graphs.stats
            assert stats.replays > 15 and stats.eager == 0
    assert responses[0] == responses[1]


def test_a_drafters_steps_share_pool_and_budget(setup) -> None:
    decoder, driver, _ = setup
    fake = Fake(temporary=500)
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
