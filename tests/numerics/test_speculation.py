"""Speculative and plain decoding give the same tokens and log-probabilities, bit for bit, whatever is drafted."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from megatron_tlt.config.block_drafters import BlockShape
from megatron_tlt.config.load import load_config
from megatron_tlt.data.prompts import build_prompts
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.drafters.checkpoint import load_drafter
from megatron_tlt.drafters.dspark.config import BlockConfig
from megatron_tlt.models.decoders.factory import build_decoder
from megatron_tlt.models.decoders.native.decoder import keyed_sample
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.loader import iter_weights
from megatron_tlt.rollout.engine import Engine
from megatron_tlt.rollout.scheduler import SchedulerLimits
from megatron_tlt.types import SamplingParams
from tests.helpers.engines import (
    OracleDrafter,
    RandomSelector,
    Responses,
    attach,
    generate_all,
    make_engine,
    random_jobs,
    small_config,
    speculating_engine,
)
from tests.helpers.fake_decoder import CharTokenizer
from tests.helpers.mpi import ROOT
from tests.helpers.stepping import run_out
from tests.helpers.tiny_models import random_weights


def plain(family: str, jobs, **options) -> tuple[Responses, list]:
    config = small_config(family)
    weights = random_weights(config, seed=5)
    return generate_all(make_engine(config, weights, **options), jobs), weights


@pytest.mark.parametrize(("family", "spoil"), [("llama", 0.0), ("llama", 0.3), ("llama", 1.0), ("qwen2_moe", 0.3)])
def test_equal_whatever_is_drafted(family, spoil):
    jobs = random_jobs(131, 8, seed=3)
    expected, weights = plain(family, jobs)
    engine = make_engine(small_config(family), weights)
    selector = RandomSelector("oracle", 6)
    attach(engine, OracleDrafter(expected, 131, spoil), selector)
    assert generate_all(engine, jobs) == expected
    assert engine.blocks.num_free == engine.blocks.num_blocks
    if spoil < 1:
        assert selector.emitted > 1.1 * selector.rows
    else:
        assert selector.emitted < 1.1 * selector.rows


def test_equal_in_small_batches_and_budgets():
    jobs = random_jobs(131, 10, seed=6)
    expected, weights = plain("qwen2", jobs)
    for max_running, budget in ((1, 16), (3, 7), (16, 40)):
        engine = make_engine(small_config("qwen2"), weights, max_running=max_running, budget=budget)
        attach(engine, OracleDrafter(expected, 131, 0.2), RandomSelector("oracle", 8))
        assert generate_all(engine, jobs) == expected


DRAFTERS = [
    {"drafter": "suffix", "selector": "fixed", "draft_len": 5},
    {"drafter": "suffix", "selector": "cost_model"},
    {"drafter": "eagle", "selector": "fixed", "draft_len": 4},
    {"drafter": "eagle", "selector": "fixed", "draft_len": 3, "catch_up": 16},
    {"drafter": "eagle", "selector": "cost_model"},
    {"drafter": "dspark", "selector": "fixed", "draft_len": 9, "catch_up": 16},
    {"drafter": "dspark", "selector": "fixed", "draft_len": 4},
]
# By length of a draft: DSpark, and DFlash 2 with a window.
BLOCKS = {9: BlockShape(2, (0,), 6, 8, 7, True), 4: BlockShape(2, (0,), 6, 0, 7, False, 8, (0, 9))}


@pytest.mark.parametrize(
    ("family", "speculation", "dtype"),
    [
        *(("qwen2_moe", drafter, torch.float32) for drafter in DRAFTERS),
        *(("llama", drafter, torch.float32) for drafter in DRAFTERS[1::2]),
        *(("llama", drafter, torch.bfloat16) for drafter in DRAFTERS[::3]),
        ("qwen2_moe", DRAFTERS[3], torch.bfloat16),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_equal_with_real_drafters(family, speculation, dtype):
    """Ample memory, then so little that requests are preempted and drafts find no blocks."""
    jobs = random_jobs(131, 8, seed=8)
    expected, weights = plain(family, jobs, dtype=dtype)
    config, shape = small_config(family), None
    if speculation["drafter"] == "dspark":
        shape = BlockConfig.of(config, BLOCKS[speculation["draft_len"]])
    for blocks in (200, 10):
        options = {"speculation": speculation, "shape": shape, "num_blocks": blocks, "dtype": dtype}
        engine = speculating_engine(config, weights, **options)
        assert generate_all(engine, jobs) == expected
        assert engine.blocks.num_free == engine.blocks.num_blocks
        stats = engine.take_stats()
        if speculation["selector"] == "fixed":
            assert stats.speculation.row_steps > 0
        assert (stats.preemptions > 0) == (blocks == 10)
        assert generate_all(engine, jobs) == expected, "a second time, in the same engine"


@pytest.mark.parametrize("drafter", ["suffix", "eagle"])
def test_torch_kernels(drafter):
    """Invariant: equal without exception. Default: responses part only where near-ties were counted."""
    jobs = random_jobs(131, 5, seed=10, longest=24)
    config = small_config("qwen3")
    weights = random_weights(config, seed=5)
    spec = {"drafter": drafter, "selector": "fixed", "draft_len": 3}
    off = {"drafter": "none"}
    made = [
        generate_all(speculating_engine(config, weights, "torch", speculation=s, numerics="invariant"), jobs)
        for s in (off, spec)
    ]
    assert made[0] == made[1]
    counting = [speculating_engine(config, weights, "torch", speculation=s, count_near_ties=True) for s in (off, spec)]
    plain_responses, other = (generate_all(engine, jobs) for engine in counting)
    parted = sum(plain_responses[key][0] != other[key][0] for key in plain_responses)
    assert parted <= sum(engine.runner.sampler.near_ties for engine in counting)


def test_stop_strings_cut_a_run():
    """A stop string inside an accepted run ends the response where plain decoding ends it."""
    tokenizer = CharTokenizer()
    config = replace(small_config("qwen3"), vocab_size=tokenizer.vocab_size)
    weights = random_weights(config, seed=6)
    params = SamplingParams(max_tokens=60, stop=("a", "zq", "th"), ignore_eos=True, seed=4)

    def build() -> Engine:
        decoder = build_decoder(config, "cpu", torch.float32, "native", 1, None)
        decoder.load_weights(weights)
        limits = SchedulerLimits(8, 128, 256, config.vocab_size)
        sample = partial(keyed_sample, threads=1)
        return Engine(decoder, limits, 100, 16, tokenizer=tokenizer, native_sample=sample)

    def run(engine: Engine) -> list:
        requests = engine.add([1, 2, 3], params, 0, indices=range(12))
        run_out(engine)
        return [(engine.text_of(r), r.output, r.logprobs, r.finish_reason) for r in requests]

    expected = run(build())
    known = {(0, i): (output, logprobs) for i, (_, output, logprobs, _) in enumerate(expected)}
    engine = build()
    attach(engine, OracleDrafter(known, config.vocab_size, 0.0), RandomSelector("oracle", 8))
    assert run(engine) == expected
    assert any(reason == "stop" for *_, reason in expected)


def test_trained_drafter_of_the_demo_policy():
    """The asset belongs to the policy (accept length far above 1), and changes nothing."""
    config = load_config(ROOT / "configs/quickstart.yaml", [f"model.path={ROOT / 'assets/demo-policy'}"])
    model = ModelConfig.from_hf(config.model.path)
    tokenizer = HFTokenizer(config.model.path)
    prompts = build_prompts(config.data, "eval", tokenizer, 0).next_batch(3)
    params = SamplingParams(max_tokens=80, stop_token_ids=tokenizer.eos_token_ids, seed=1)
    jobs = [(p.prompt_id, list(p.token_ids), params, 2) for p in prompts]
    weights = list(iter_weights(config.model.path, model))
    expected = generate_all(speculating_engine(model, weights, speculation={"drafter": "none"}, budget=256), jobs)
    saved = load_drafter(ROOT / "assets/demo-drafter", model)
    options = {"drafter": "eagle", "selector": "fixed", "draft_len": 5}
    engine = speculating_engine(model, weights, "native", saved.weights, speculation=options, budget=256)
    assert generate_all(engine, jobs) == expected
    assert engine.take_stats().speculation.accept_length > 3
