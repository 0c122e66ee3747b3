"""Small engines around real decoders, and requests for them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.drafters.eagle.config import EagleConfig
from megatron_tlt.drafters.model import DrafterConfig
from megatron_tlt.drafters.registry import KINDS
from megatron_tlt.models.decoders.base import Decoder
from megatron_tlt.models.decoders.factory import build_decoder
from megatron_tlt.models.decoders.keyed_noise import gumbel_noise, key_tensor
from megatron_tlt.models.decoders.native.decoder import keyed_sample
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.rollout.engine import Engine
from megatron_tlt.rollout.request import Request
from megatron_tlt.rollout.sampler import Sampler, SamplingRows
from megatron_tlt.rollout.scheduler import SchedulerLimits
from megatron_tlt.rollout.speculation.build import Drafting
from megatron_tlt.types import SamplingParams
from tests.helpers.tiny_drafters import random_drafter

Job = tuple[int, list[int], SamplingParams, int]  # prompt id, prompt, params, samples
Responses = dict[tuple[int, int], tuple[list[int], list[float]]]


def small_config(family: str) -> ModelConfig:
    """A tiny model of a family, without importing transformers (slow on many ranks)."""
    heads, kv_heads = {"qwen2": (6, 2), "qwen3": (4, 4), "llama": (8, 1), "qwen2_moe": (6, 2)}[family]
    experts = {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 32,
        "moe_layers": (1,),
    }
    return ModelConfig(
        family,  # type: ignore[arg-type]
        vocab_size=131,
        hidden_size=64,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=16,
        intermediate_size=96,
        tie_word_embeddings=family != "llama",
        qkv_bias=family in ("qwen2", "qwen2_moe"),
        qk_norm=family == "qwen3",
        **(experts if family == "qwen2_moe" else {}),  # type: ignore[arg-type]
    )


def assert_scored(model, jobs: list[Job], responses: Responses) -> None:
    """The log-probabilities of all responses are those that a pass of `transformers`' model over them gives."""
    for prompt_id, prompt, params, n in jobs:
        for index in range(n):
            tokens, logprobs = responses[prompt_id, index]
            with torch.no_grad():
                logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            scored = (logits / (params.temperature or 1.0)).log_softmax(-1)
            expected = scored.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)


class CountingSampler(Sampler):
    """The PyTorch sampler; counts draws that rounding may decide."""

    near_ties = 0

    def _sample_part(self, logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        heat = torch.from_numpy(rows.temperature).unsqueeze(1)
        scores = rows.apply_masks(logits.float() / torch.where(heat > 0, heat, 1.0))
        noise = gumbel_noise(key_tensor(rows.keys, logits.device), logits.shape[1])
        best = (scores + noise.masked_fill(heat == 0, 0.0)).topk(2).values
        self.near_ties += int((best[:, 0] - best[:, 1] <= 1e-5).sum())
        return super()._sample_part(logits, rows)


def make_engine(
    config: ModelConfig,
    weights: list[tuple[str, Tensor]],
    kernels: str = "native",
    num_blocks: int = 200,
    max_running: int = 16,
    budget: int = 128,
    tp=None,
    count_near_ties: bool = False,
    dtype: torch.dtype = torch.float32,
    numerics: str = "default",
    drafting: Callable[[Decoder], Drafting] | None = None,
    aux_layers: tuple[int, ...] = (),
) -> Engine:
    decoder = build_decoder(config, "cpu", dtype, kernels, 1, tp, numerics, aux_layers)
    decoder.load_weights(weights)
    engine = Engine(
        decoder,
        SchedulerLimits(max_running, budget, 256, config.vocab_size),
        num_blocks,
        16,
        eos_token_ids=(0,),
        tp=tp,
        native_sample=partial(keyed_sample, threads=1) if kernels == "native" else None,
        drafting=None if drafting is None else drafting(decoder),
    )
    if count_near_ties:
        engine.runner.sampler = CountingSampler(decoder.device)
    return engine


def speculating_engine(
    config: ModelConfig,
    weights: list[tuple[str, Tensor]],
    kernels: str = "native",
    drafter_weights: dict[str, Tensor] | None = None,
    *,
    speculation: dict[str, Any],
    shape: DrafterConfig | None = None,
    **sizes: Any,
) -> Engine:
    """As `make_engine`, with the fields of `rollout.speculation`, and `catch_up` of `Drafting`; a trained drafter, of
    kind eagle by default, is random unless given.
    """
    drafter = shape or EagleConfig.of(config)

    def drafting(decoder: Decoder) -> Drafting:
        fields = dict(speculation)
        more = {"catch_up": fields.pop("catch_up")} if "catch_up" in fields else {}
        section = SpeculationSection(drafter_path="(in memory)", **fields)
        made = None
        if section.trained:
            made = KINDS[drafter.kind].build_decoder(decoder, drafter)
            made.load_weights((drafter_weights or random_drafter(drafter, seed=1)).items())
        return Drafting(section, made, **more)

    layers = drafter.aux_layers
    return make_engine(config, weights, kernels, drafting=drafting, aux_layers=layers, **sizes)


def random_jobs(vocab: int, count: int, seed: int = 0, longest: int = 40) -> list[Job]:
    rng = random.Random(seed)
    jobs = []
    for i in range(count):
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.8, 1.0]),
            top_k=rng.choice([0, 0, 20]),
            top_p=rng.choice([1.0, 1.0, 0.9]),
            min_p=rng.choice([0.0, 0.0, 0.02]),
            max_tokens=rng.randint(1, longest),
            ignore_eos=rng.random() < 0.5,
            seed=17,
        )
        prompt = [rng.randrange(1, vocab) for _ in range(rng.randint(1, 60))]
        jobs.append((i, prompt, params, rng.randint(1, 4)))
    return jobs


def generate_all(engine: Engine, jobs: list[Job]) -> Responses:
    for prompt_id, prompt, params, n in jobs:
        engine.add(prompt, params, prompt_id, num_samples=n)
    return collect(engine.run())


def collect(requests: list[Request]) -> Responses:
    return {(r.prompt_id, r.sample_index): (r.output, r.logprobs) for r in requests}
