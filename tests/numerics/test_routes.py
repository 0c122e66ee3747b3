"""The record of the experts that each token chose: those of `transformers`, whatever the engine did on its way."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from megatron_tlt.rollout.engine import Engine, GraphBudget
from megatron_tlt.rollout.scheduler import SchedulerLimits
from tests.helpers.engines import OracleDrafter, RandomSelector, attach, generate_all, make_engine, random_jobs
from tests.helpers.stepping import run_out
from tests.helpers.tiny_models import hf_model, model_config, named_weights

JOBS = random_jobs(131, 6, seed=4)
Recorded = dict[tuple[int, int], tuple[list[int], np.ndarray]]


@cache
def model():
    return hf_model("qwen3_moe_mixed")  # a dense layer among those with experts


def engine(kernels: str, **sizes) -> Engine:
    return make_engine(model_config(model()), named_weights(model()), kernels, **sizes)


def recorded(engine: Engine) -> Recorded:
    engine.record_routed_experts()
    for prompt_id, prompt, params, n in JOBS:
        engine.add(prompt, params, prompt_id, indices=range(n))
    return {(r.prompt_id, r.sample_index): (r.output, r.routed_experts) for r in run_out(engine)}


def assert_equal(got: Recorded, want: Recorded) -> None:
    assert got.keys() == want.keys()
    for at, (tokens, routed_experts) in got.items():
        assert tokens == want[at][0]
        assert np.array_equal(routed_experts, want[at][1])


@pytest.mark.parametrize("how", [("native", "default"), ("torch", "default"), ("torch", "invariant")])
def test_every_fed_token_has_the_experts_of_transformers(how: tuple[str, str]) -> None:
    responses = recorded(engine(how[0], numerics=how[1]))
    for prompt_id, prompt, _, n in JOBS:
        for index in range(n):
            tokens, routed_experts = responses[prompt_id, index]
            with torch.no_grad():
                out = model()(torch.tensor([prompt + tokens[:-1]]), output_router_logits=True)
            want = torch.stack([logits.topk(2).indices for logits in out.router_logits], 1)
            assert routed_experts.dtype == np.uint8
            assert np.array_equal(routed_experts, want.numpy())


def test_rejected_drafts_leave_nothing_and_preempted_requests_lose_nothing() -> None:
    want, responses = recorded(engine("native")), generate_all(engine("native"), JOBS)
    for blocks in (200, 8):
        other = engine("native", num_blocks=blocks)
        attach(other, OracleDrafter(responses, 131, 0.3), RandomSelector("oracle", 6))
        assert_equal(recorded(other), want)
        stats = other.take_stats()
        assert stats.speculation.row_steps > 0 and (stats.preemptions > 0) == (blocks == 8)
    other.release()
    other.resume()
    assert_equal(recorded(other), want)


def test_steps_in_fixed_shapes_record_the_same() -> None:
    """Padding rows choose experts, too, and nothing of them is kept."""
    plain = engine("torch")
    limits = SchedulerLimits(16, 128, 256, 131)
    decoder = plain.runner.decoder
    graphs = GraphBudget(decoder, None, 64)
    pooled = Engine(decoder, limits, 200, 16, eos_token_ids=(0,), graphs=graphs)
    attach(pooled, OracleDrafter(generate_all(plain, JOBS), 131, 0.3), RandomSelector("oracle", 6))
    assert_equal(recorded(pooled), recorded(plain))
