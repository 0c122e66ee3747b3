"""Small engines that speculate with real drafters: suffix, eagle (random or taught by hand), hybrid."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.eagle.base import eagle_parameter_shapes
from megatron_tlt.models.factory import build_decoder, build_eagle
from megatron_tlt.models.native.decoder import keyed_sample
from megatron_tlt.rollout.engine import Engine
from megatron_tlt.rollout.scheduler import SchedulerLimits
from megatron_tlt.rollout.spec.build import Drafting


def eagle_weights(config: ModelConfig, seed: int = 1) -> dict[str, Tensor]:
    """Random weights of a drafter."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(shape)
        if "norm" in name
        else torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        for name, shape in eagle_parameter_shapes(config).items()
    }


def speculating_engine(
    config: ModelConfig,
    weights: list[tuple[str, Tensor]],
    kernels: str = "native",
    numerics: str = "default",
    num_blocks: int = 200,
    max_running: int = 16,
    budget: int = 128,
    tp: Any = None,
    count_near_ties: bool = False,
    dtype: torch.dtype = torch.float32,
    drafter_weights: dict[str, Tensor] | None = None,
    **speculation: Any,
) -> Engine:
    """As `engines.make_engine`, with `rollout.speculation` from the keywords."""
    section = SpeculationSection(drafter_path="(in memory)", **speculation)
    decoder = build_decoder(config, "cpu", dtype, kernels, 1, tp, numerics)
    decoder.load_weights(weights)
    eagle = None
    if section.drafter in ("eagle", "hybrid"):
        eagle = build_eagle(decoder)
        eagle.load_weights((drafter_weights or eagle_weights(config)).items())
    return Engine(
        decoder,
        SchedulerLimits(max_running, budget, 256, config.vocab_size),
        num_blocks,
        16,
        eos_token_ids=(0,),
        tp=tp,
        native_sample=partial(keyed_sample, threads=1) if kernels == "native" else None,
        count_near_ties=count_near_ties,
        drafting=Drafting(section, eagle),
    )
