"""Arguments for TensorRT-LLM by version: of the engine, of speculation, of one request. Pure functions.

Everything is plain data that crosses the socket (see `server.instantiate`). Names are held to the signatures
in tests/contracts/trtllm.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.backends.trtllm.server import CLASS
from megatron_tlt.models.decoders.base import ENGINE_DTYPES

if TYPE_CHECKING:
    from megatron_tlt.config.model import ModelSection
    from megatron_tlt.config.rollout import RolloutSection
    from megatron_tlt.types import SamplingParams

SLEEP_TAGS = ("kv_cache",)  # memory that is given back between rollouts; its contents are worth nothing then
_GRAPHS = {CLASS: "CudaGraphConfig", "enable_padding": True}


@dataclass(frozen=True, slots=True)
class Eagle3Files:
    """An EAGLE-3 drafter in TensorRT-LLM's layout, which the engine reads at its start."""

    folder: Path
    layers: tuple[int, ...]  # policy layers, from 0, whose outputs it reads


def build_spec_config(draft_len: int, version: str, drafter: Eagle3Files | None) -> dict[str, Any] | None:
    """The speculative config; None without speculation.

    EAGLE-3 runs as one model: there the emitted token is always the policy's own sample, so any drafter is lossless,
    but only with `allow_advanced_sampling`: without it the temperature is ignored and every response is greedy.
    """
    if drafter is None:
        return None
    fields: dict[str, Any] = {
        "max_draft_len": draft_len,
        "speculative_model": str(drafter.folder.resolve()),
        "allow_advanced_sampling": True,
        "eagle3_layers_to_capture": sorted(drafter.layers),
    }
    if version.startswith("1.2."):
        return {CLASS: "EagleDecodingConfig", "eagle3_one_model": True, **fields}
    return {CLASS: "Eagle3DecodingConfig", **fields}  # one model is all there is


def build_llm_kwargs(
    rollout: RolloutSection, model: ModelSection, version: str, drafter: Eagle3Files | None = None
) -> dict[str, Any]:
    """Arguments of `AsyncLLM` of TensorRT-LLM `version`, without the worker extension.

    `max_input_len` is always set: later versions refuse prompts above a default of 1024 otherwise. The tokenizer
    stays out: prompts and responses are tokens, and stops are token ids. `rollout.trtllm.engine` adds fields, and
    `check` lets it replace none.
    """
    section = rollout.trtllm
    kwargs: dict[str, Any] = {
        "model": str(Path(model.path).resolve()),
        "backend": "pytorch",
        "dtype": ENGINE_DTYPES[rollout.dtype],
        "skip_tokenizer_init": True,
        "tensor_parallel_size": 1,
        "max_seq_len": model.max_context,
        "max_input_len": model.max_context,
        "max_batch_size": rollout.max_running_requests,
        "max_num_tokens": rollout.max_batched_tokens,
        "enable_chunked_prefill": True,
        "enable_iter_perf_stats": True,
        "kv_cache_config": {
            CLASS: "KvCacheConfig",
            "enable_block_reuse": True,
            "free_gpu_memory_fraction": section.kv_cache_fraction,
        },
        "cuda_graph_config": {**_GRAPHS, "max_batch_size": rollout.max_running_requests}
        if rollout.graph_memory_mib
        else None,
    }
    if (config := build_spec_config(rollout.speculation.draft_len, version, drafter)) is not None:
        kwargs["speculative_config"] = config
    if rollout.release_cache:
        is_old = version.startswith("1.2.")
        kwargs |= {"enable_sleep": True} if is_old else {"sleep_config": {CLASS: "SleepConfig"}}
    return {**kwargs, **section.engine}


def build_sampling_params(params: SamplingParams, eos_token_ids: Iterable[int]) -> dict[str, Any]:
    """Arguments of `SamplingParams` beside the seed. With speculation, whose sampler has none, `check` refuses min_p.

    top-k and top-p are always passed (0 and 1: off), for without them the engine decodes greedily. Log-probs are
    never requested: with speculation there are none, and without it the engine's are not of the scaled logits that we
    mean; the actor computes them. `end_id` -1 with stop ids that stay in the output keeps the end token.
    """
    min_p = float(params.min_p)
    is_greedy = params.temperature == 0
    ends = () if params.ignore_eos else eos_token_ids
    given: dict[str, Any] = {
        "temperature": 1.0 if is_greedy else float(params.temperature),
        "top_k": 1 if is_greedy else params.top_k,
        "top_p": 1.0 if is_greedy else float(params.top_p),
        "max_tokens": params.max_tokens,
        "end_id": -1,
        "stop_token_ids": sorted({*ends, *params.stop_token_ids}) or None,
        "include_stop_str_in_output": True,
        "detokenize": False,
    }
    return given | ({"min_p": min_p} if min_p > 0 and not is_greedy else {})
