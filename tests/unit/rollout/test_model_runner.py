"""What the decoder is given; the path over a device buffer; the budget of a step's own time."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch

from megatron_tlt.errors import BackendError
from megatron_tlt.models.native.decoder import NativeDecoder, keyed_sample
from megatron_tlt.models.native.step import NativeStep
from megatron_tlt.rollout.engine import Engine
from megatron_tlt.rollout.kv_cache import choose_num_blocks, free_memory
from megatron_tlt.rollout.model_runner import _Upload
from megatron_tlt.rollout.scheduler import SchedulerLimits
from megatron_tlt.types import SamplingParams
from tests.helpers.drafters import OracleDrafter, RandomSelector, attach
from tests.helpers.engines import small_config
from tests.helpers.fake_decoder import FakeDecoder, NullDecoder
from tests.helpers.tiny_models import random_weights

CPU = torch.device("cpu")


def make_engine(decoder: FakeDecoder, max_running: int = 8, context: int = 128) -> Engine:
    return Engine(decoder, SchedulerLimits(max_running, 64, context, decoder.vocab_size), 4096, 16)


def run(engine: Engine) -> list[list[int]]:
    for i in range(10):
        engine.add(
            [1 + i, 2, 3] * (i + 1), SamplingParams(max_tokens=9 + 3 * i, ignore_eos=True), i, num_samples=3
        )
    return [r.output for r in engine.run()]


def test_one_staging_buffer_carries_the_same_inputs():
    """What CUDA gets: all inputs of a step cross in one copy. The answers are the same."""
    plain, staged = make_engine(FakeDecoder()), make_engine(FakeDecoder())
    rows = staged.scheduler.rows
    staged.runner._upload = _Upload(6 * len(rows.token_ids) + 1 + rows.block_tables.size, CPU)
    assert run(staged) == run(plain)


@pytest.mark.parametrize("running", [1, 64])
def test_a_decoding_step_costs_little_beside_the_forward(running: int):
    """Measured: 40 us at 1 and 45 us at 64 running requests. The bound leaves room for busy machines."""
    engine = make_engine(NullDecoder(), max_running=running, context=700)

    def sample(logits, temperature, keys):
        return torch.full((len(logits),), 5, dtype=torch.int32), torch.zeros(len(logits))

    engine.runner.sampler._native = sample
    for i in range(running):
        engine.add([1] * (i % 7 + 1), SamplingParams(max_tokens=600, ignore_eos=True), i)
    while engine.num_waiting:
        engine.step()
    taken = []
    for _ in range(400):
        started = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - started)
    assert sorted(taken)[len(taken) // 10] < 250e-6


def test_the_cache_is_sized_by_need_and_by_budget():
    sizes = {"block_size": 16, "max_running": 4, "max_context": 100, "device": CPU}
    assert choose_num_blocks(1000, budget_bytes=None, **sizes) == 4 * 7 + 1
    assert choose_num_blocks(1 << 20, budget_bytes=5 << 20, **sizes) == 5
    huge = choose_num_blocks(1 << 20, budget_bytes=None, **(sizes | {"max_running": 10**9}))
    assert 0 < huge << 20 <= free_memory() * 0.3
    with pytest.raises(BackendError, match=r"raise rollout\.kv_cache_mib"):
        choose_num_blocks(2 << 20, budget_bytes=1 << 20, **sizes)


def native_engine(decoder: NativeDecoder, **options) -> Engine:
    sample = partial(keyed_sample, threads=1)
    return Engine(decoder, SchedulerLimits(4, 64, 128, 131), 64, 16, native_sample=sample, **options)


def test_steps_in_one_call_are_taken_where_nothing_needs_the_logits(monkeypatch: pytest.MonkeyPatch):
    """Masked rows and near-ties take the long way; the answers are the same."""
    config = small_config("qwen3")
    decoder = NativeDecoder(config)
    decoder.load_weights(random_weights(config, seed=5))
    assert native_engine(decoder, count_near_ties=True).runner.native_step is None
    assert make_engine(FakeDecoder()).runner.native_step is None
    calls: list[str] = []
    for name in ("decode", "verify"):
        inner = getattr(NativeStep, name)
        monkeypatch.setattr(NativeStep, name, lambda *a, f=inner, n=name: (calls.append(n), f(*a))[1])

    def answers(params: SamplingParams, in_one: bool, drafts: bool = False) -> list[list[int]]:
        engine = native_engine(decoder)
        if not in_one:
            engine.runner.native_step = None
        if drafts:
            attach(engine, OracleDrafter({}, 131, 0.0, True), RandomSelector("oracle", 4, 3))
        engine.add([1, 2, 3], params, 0, num_samples=3)
        return [r.output for r in engine.run()]

    open_params = SamplingParams(max_tokens=20, ignore_eos=True)
    masked = SamplingParams(max_tokens=20, ignore_eos=True, top_k=5)
    for params, drafts, expected in (
        (open_params, False, {"decode"}),
        (open_params, True, {"decode", "verify"}),
        (masked, False, set()),
        (masked, True, set()),
    ):
        calls.clear()
        assert answers(params, True, drafts) == answers(params, False)
        assert set(calls) == expected
