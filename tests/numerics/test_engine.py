"""The engine against `transformers`, and against itself under every schedule (fp32, CPU)."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from megatron_tlt.types import SamplingParams
from tests.helpers.engines import Job, Responses, collect, generate_all, make_engine, random_jobs
from tests.helpers.stepping import run_out
from tests.helpers.tiny_models import hf_model, model_config, named_weights

FAMILIES = ["llama", "qwen2_moe"]  # logits of every family: test_decoder_parity.py
KERNELS = ["native", "torch"]


@cache
def tiny(family: str):
    return hf_model(family)


def engine_of(family: str, kernels: str = "native", **sizes):
    model = tiny(family)
    return make_engine(model_config(model), named_weights(model), kernels, **sizes)


PROMPTS = [[random.Random(n).randrange(1, 131) for _ in range(n)] for n in (1, 15, 16, 17, 40, 70)]


@cache
def generated(family: str) -> list[list[int]]:
    """What `generate` of transformers responses to `PROMPTS`."""
    responses = []
    for prompt in PROMPTS:
        options = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}
        with torch.no_grad():
            ids = tiny(family).generate(torch.tensor([prompt]), **options)
        responses.append(ids[0, len(prompt) :].tolist())
    return responses


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_generate(family: str, kernels: str):
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    engine = engine_of(family, kernels, budget=50)
    responses = generate_all(engine, [(i, prompt, params, 1) for i, prompt in enumerate(PROMPTS)])
    assert [responses[i, 0][0] for i in range(len(PROMPTS))] == generated(family)


def one_by_one(family: str, jobs: list[Job]) -> Responses:
    responses: Responses = {}
    engine = engine_of(family, max_running=1, budget=256)
    for prompt_id, prompt, params, n in jobs:
        for index in range(n):
            engine.add(prompt, params, prompt_id, indices=[index])
            responses |= collect(run_out(engine))
    return responses


@pytest.mark.parametrize("family", FAMILIES)
def test_responses_do_not_depend_on_the_schedule(family: str):
    """Alone, in a batch, in any order, in chunks, with preemption: the same bits, log-probs included."""
    jobs = random_jobs(131, 20, seed=6)
    alone = one_by_one(family, jobs)
    assert generate_all(engine_of(family), jobs) == alone
    assert generate_all(engine_of(family, budget=7, max_running=3), jobs) == alone
    assert generate_all(engine_of(family, max_running=64, budget=512), random.Random(1).sample(jobs, 20)) == alone
    tight = engine_of(family, num_blocks=9)
    assert generate_all(tight, jobs) == alone
    assert tight.take_stats().preemptions > 5
    assert tight.blocks.num_free == tight.blocks.num_blocks
