"""Arguments of vLLM's engine and of one request, as plain data that crosses the socket. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.errors import ConfigError
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.types import DraftStrategy

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_tlt.config.model import ModelSection
    from megatron_tlt.config.rollout import RolloutSection
    from megatron_tlt.types import SamplingParams

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
SUFFIX_PROPOSER = "megatron_tlt.backends.vllm.plugin.suffix.SuffixProposer"
# Policies whose EAGLE drafter vLLM has a class for: its own for Llama, the plugin's for Qwen3.
EAGLE_FAMILIES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def strategy_of(rollout: RolloutSection) -> DraftStrategy:
    """What every decoding step drafts."""
    kind, count = rollout.speculation.drafter, rollout.vllm.draft_len
    return DraftStrategy("none", 0) if kind == "none" else DraftStrategy(kind, count, 1, count + 1)


def speculative_config(rollout: RolloutSection, drafter: Path | None) -> dict[str, Any] | None:
    """vLLM's `speculative_config`; None without speculation. `drafter`: the directory of `drafter_config`."""
    section = rollout.vllm
    if rollout.speculation.drafter == "none":
        return None
    if rollout.speculation.drafter == "suffix":
        return {
            "method": "custom_class",
            "num_speculative_tokens": section.draft_len,
            "model": SUFFIX_PROPOSER,
        }
    assert drafter is not None
    return {"method": "eagle", "num_speculative_tokens": section.draft_len, "model": str(drafter)}


def engine_args(
    rollout: RolloutSection,
    model: ModelSection,
    cache_bytes: int,
    speculation: Mapping[str, Any] | None,
    is_eager: bool,
) -> dict[str, Any]:
    """Arguments of `vllm.EngineArgs`. Raises ConfigError.

    Weights are dummies until the first push, which brings them in the same way as every later one. No prefix cache:
    requests of one prompt would lack the hidden states of the part that they share.
    """
    arguments: dict[str, Any] = {
        "model": str(Path(model.path).resolve()),
        "load_format": "dummy",
        "dtype": DTYPES[rollout.dtype],
        "skip_tokenizer_init": True,
        "max_model_len": model.max_context,
        "max_num_seqs": rollout.max_running_requests,
        "max_num_batched_tokens": max(rollout.max_batched_tokens, model.max_context),
        "kv_cache_memory_bytes": cache_bytes,
        "enable_prefix_caching": False,
        "async_scheduling": False,  # a step's tokens are known before the next one is scheduled
        "disable_log_stats": True,
        "enforce_eager": is_eager,
        "speculative_config": None if speculation is None else dict(speculation),
    }
    both = arguments.keys() & rollout.vllm.engine.keys()
    if both:
        allowed = f"set by other settings already: {', '.join(sorted(both))}"
        raise ConfigError.of("rollout.vllm.engine", rollout.vllm.engine, allowed)
    return arguments | rollout.vllm.engine


def request_args(params: SamplingParams, eos_token_ids: Iterable[int]) -> dict[str, Any]:
    """What the requests of a `generate` share: their ends, and how our sampler draws."""
    ends = () if params.ignore_eos else eos_token_ids
    return {
        "max_tokens": params.max_tokens,
        "stop_token_ids": sorted({*ends, *params.stop_token_ids}),
        "sampling": [params.temperature, params.top_k, params.top_p, params.min_p],
    }


def drafter_config(policy: ModelConfig, dtype: str) -> dict[str, Any]:
    """config.json of this policy's EAGLE drafter for vLLM. Raises ConfigError for a policy without a class there."""
    if policy.family not in EAGLE_FAMILIES:
        allowed = (
            f"vLLM has no EAGLE drafter of this kind for {policy.family} policies, only for llama and qwen3"
        )
        raise ConfigError.of("rollout.speculation.drafter", "eagle", allowed)
    return policy.to_hf(DTYPES[dtype]) | {
        "architectures": [EAGLE_FAMILIES[policy.family]],  # vLLM puts Eagle before it
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,  # a drafter without tables shares the policy's
    }


def drafter_tensors(weights: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Our drafter's tensors under vLLM's names."""
    return [
        (name.replace("layer.", "layers.0.", 1) if name.startswith("layer.") else name, t)
        for name, t in weights.items()
    ]
