"""What the decoder is given; the budget of a step's own time; the size of the cache."""

from __future__ import annotations

import pytest
import torch

from megatron_tlt.errors import BackendError
from megatron_tlt.rollout.engine import Engine
from megatron_tlt.rollout.kv_cache import choose_num_blocks, free_memory
from megatron_tlt.rollout.scheduler import SchedulerLimits
from megatron_tlt.types import SamplingParams
from tests.helpers.fake_decoder import FakeDecoder
from tests.helpers.stepping import run_out

CPU = torch.device("cpu")


def make_engine(decoder: FakeDecoder, max_running: int = 8, context: int = 128) -> Engine:
    return Engine(decoder, SchedulerLimits(max_running, 64, context, decoder.vocab_size), 4096, 16)


def run(engine: Engine) -> list[list[int]]:
    for i in range(10):
        engine.add([1 + i, 2, 3] * (i + 1), SamplingParams(max_tokens=9 + 3 * i, ignore_eos=True), i, indices=range(3))
    return [r.output for r in run_out(engine)]


def test_one_copy_carries_the_same_inputs():
    """What CUDA gets: all inputs of a step cross in one copy. The responses are the same."""
    plain, copied = make_engine(FakeDecoder()), make_engine(FakeDecoder())
    copied.runner._uploads = True
    assert run(copied) == run(plain)


def test_the_cache_is_sized_by_need_and_by_budget():
    sizes = {"block_size": 16, "max_running": 4, "max_context": 100, "device": CPU}
    assert choose_num_blocks(1000, budget_bytes=None, **sizes) == 4 * 7 + 1
    assert choose_num_blocks(1 << 20, budget_bytes=5 << 20, **sizes) == 5
    huge = choose_num_blocks(1 << 20, budget_bytes=None, **(sizes | {"max_running": 10**9}))
    assert 0 < huge << 20 <= free_memory() * 0.3
    with pytest.raises(BackendError, match=r"raise rollout\.kv_cache_mib"):
        choose_num_blocks(2 << 20, budget_bytes=1 << 20, **sizes)
    assert choose_num_blocks(1 << 20, budget_bytes=5 << 20, **sizes, longest_request=64) == 5
    with pytest.raises(BackendError, match="a request of 65 tokens needs 6 KV-cache blocks"):
        choose_num_blocks(1 << 20, budget_bytes=5 << 20, **sizes, longest_request=65)
