"""The settings on which responses depend, and the cache of responses of a command that writes one file."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_tlt.actor.checkpoint_files import model_record
from megatron_tlt.config.run import UNFINISHED, RolloutCacheSection
from megatron_tlt.data.tokenizer import end_tokens
from megatron_tlt.distributed.processors import processor
from megatron_tlt.envs.build import environment_fingerprint
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.resilience.rollout_cache import RolloutCache

if TYPE_CHECKING:
    from megatron_tlt.config.env import EnvSection
    from megatron_tlt.config.rollout import RolloutSection
    from megatron_tlt.data.tokenizer import HFTokenizer
    from megatron_tlt.distributed.together import Ranks
    from megatron_tlt.interfaces import RolloutBackend
    from megatron_tlt.types import SamplingParams


def response_identity(
    params: SamplingParams,
    rollout: RolloutSection,
    env: EnvSection | None,
    model: str | Path,
    tokenizer: HFTokenizer | None,
    device: torch.device | str,
    ranks: Ranks,
) -> dict[str, Any]:
    """The settings on which a response of the policy in `model` depends, beside prompt and weights; JSON-able, the same
    on all `ranks`. Of the model these are the shape and constants of its config.json. Collective. Raises EnvError.
    """
    device, shape, process = torch.device(device), ModelConfig.from_hf(model), rollout.engine_process
    kinds = sorted({*ranks.all_gather_object(processor(device))}) if device.type == "cpu" else []
    return {
        **asdict(params),
        "model": model_record(shape),
        "eos": end_tokens(model, tokenizer),
        "device": device.type,
        "processors": kinds,  # another kind has other last bits
        **({} if env is None else {"env": environment_fingerprint(env)}),
        **{name: getattr(rollout, name) for name in ("dtype", "kernels", "numerics", "tp")},
        **({} if process is None else {"backend": rollout.backend, "engine": process.engine}),
    }


def cache_beside(
    out: Path | None,
    section: RolloutCacheSection,
    ranks: Ranks,
    backend: RolloutBackend,
    identity: Mapping[str, Any],
) -> RolloutCache:
    """The cache of a command that writes `out` whole at its end: OUT.unfinished, until `clear`. The caller
    begins its one step, with the weights that the engine then has.

    Nothing is kept where `out` is None, a pipe or a device. Makes the directory of `out`. `identity`:
    `response_identity`. Collective. Raises OSError.
    """
    enabled = section.enabled and out is not None and (out.is_file() or not out.exists())
    enabled, directory = ranks.broadcast_object(enabled), Path(f"{out}.{UNFINISHED}")
    if enabled and ranks.is_main:
        directory.parent.mkdir(parents=True, exist_ok=True)
    cache = RolloutCache(
        RolloutCacheSection(enabled=enabled),
        directory,
        ranks,
        backend,
        identity=identity,
        tp=identity["tp"],
        max_bytes=math.inf,  # as of OUT
    )
    if cache.keeps and ranks.is_main:
        text = f"finished responses are kept in {directory} until all are there: the same command goes on with them"
        print(text, file=sys.stderr, flush=True)
    cache.start(0)
    return cache
