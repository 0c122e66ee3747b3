"""Arguments for TensorRT-LLM by version: of the engine, of speculation, of one request. Pure functions.

Everything is plain data that crosses the socket; `{CLASS: "KvCacheConfig", ...}` stands for an instance of that class
of `tensorrt_llm.llmapi`, which only the other process can make. Names and defaults are held to the recorded contracts
in tests/contracts/trtllm. Only the standard library is imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CLASS = "$class"  # marks a map that is an instance
CLASSES = (
    "KvCacheConfig",
    "CudaGraphConfig",
    "SleepConfig",
    "EagleDecodingConfig",
    "Eagle3DecodingConfig",
    "NGramDecodingConfig",
)
EXTENSION = "extension.TltWorkerExtension"  # below the name that process.py gives this package there
SLEEP_TAGS = ("kv_cache",)  # memory that is given back between rollouts; its contents are worth nothing then
_SERIES = re.compile(r"1\.([23])\.\d+(rc\d+)?(\.post\d+)?")
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Speculation:
    """Who drafts in the engine: "none", "ngram" (the request's own text) or "eagle3" (a trained drafter)."""

    kind: str = "none"
    draft_len: int = 4
    drafter_path: str | None = None  # eagle3: an exported directory
    layers_to_capture: tuple[
        int, ...
    ] = ()  # eagle3: whose outputs the drafter reads; (): the engine's default
    ngram_size: int = 4  # ngram: longest text that is looked up


def series(version: str) -> str:
    """The series, "1.2" or "1.3". Raises ValueError for a version whose names are not recorded."""
    match = _SERIES.fullmatch(version)
    if match is None:
        raise ValueError(f"TensorRT-LLM {version!r}: 1.2.x and 1.3.x are known")
    return f"1.{match[1]}"


def build_spec_config(version: str, spec: Speculation) -> dict[str, Any] | None:
    """The speculative config; None without speculation. Raises ValueError.

    EAGLE-3 runs as one model: there the emitted token is always the policy's own sample, so any drafter is lossless,
    but only with `allow_advanced_sampling`: without it the temperature is ignored and every answer is greedy.
    """
    if spec.kind == "none":
        return None
    if spec.draft_len < 1:
        raise ValueError(f"a draft length of {spec.draft_len}")
    if spec.kind == "ngram":
        sizes = {"max_draft_len": spec.draft_len, "max_matching_ngram_size": spec.ngram_size}
        return {CLASS: "NGramDecodingConfig", **sizes}
    if spec.kind != "eagle3":
        raise ValueError(f"unknown speculation {spec.kind!r}")
    if spec.drafter_path is None:
        raise ValueError("eagle3 needs the directory of a drafter")
    fields: dict[str, Any] = {
        "max_draft_len": spec.draft_len,
        "speculative_model": spec.drafter_path,
        "allow_advanced_sampling": True,
    }
    if spec.layers_to_capture:
        fields["eagle3_layers_to_capture"] = sorted(spec.layers_to_capture)
    if series(version) == "1.2":
        return {CLASS: "EagleDecodingConfig", "eagle3_one_model": True, **fields}
    return {CLASS: "Eagle3DecodingConfig", **fields}  # one model is all there is


@dataclass(frozen=True, slots=True)
class EngineSize:
    """What an engine must hold; lengths in tokens."""

    model: str
    dtype: str  # "fp32" or "bf16"
    max_context: int  # prompt and answer
    max_running: int  # requests in one forward
    max_batched_tokens: int
    kv_cache_fraction: float  # of the memory that is free once the weights are there
    graphs: bool = True
    graph_sizes: tuple[int, ...] = ()  # (): the engine's own ladder up to max_running


def build_llm_kwargs(
    version: str, size: EngineSize, spec: Speculation, *, sleep: bool, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Arguments of `AsyncLLM`, without the worker extension. Raises ValueError.

    `max_input_len` is always set: later versions refuse prompts above a default of 1024 otherwise. The tokenizer
    stays out: prompts and answers are tokens, and stops are token ids. `extra` adds fields, it replaces none.
    """
    kwargs: dict[str, Any] = {
        "model": size.model,
        "backend": "pytorch",
        "dtype": _DTYPES[size.dtype],
        "skip_tokenizer_init": True,
        "tensor_parallel_size": 1,
        "max_seq_len": size.max_context,
        "max_input_len": size.max_context,
        "max_batch_size": size.max_running,
        "max_num_tokens": size.max_batched_tokens,
        "enable_chunked_prefill": True,
        "enable_iter_perf_stats": True,
        "kv_cache_config": {
            CLASS: "KvCacheConfig",
            "enable_block_reuse": True,
            "free_gpu_memory_fraction": size.kv_cache_fraction,
        },
        "cuda_graph_config": _graphs(size) if size.graphs else None,
    }
    if (config := build_spec_config(version, spec)) is not None:
        kwargs["speculative_config"] = config
    if sleep:
        kwargs |= (
            {"enable_sleep": True} if series(version) == "1.2" else {"sleep_config": {CLASS: "SleepConfig"}}
        )
    both = kwargs.keys() & (extra or {}).keys()
    if both:
        raise ValueError(f"set by other settings already: {', '.join(sorted(both))}")
    return kwargs | dict(extra or {})


def _graphs(size: EngineSize) -> dict[str, Any]:
    """Exactly one of sizes and maximum: versions differ in what they make of both."""
    if size.graph_sizes:
        sizes = {"batch_sizes": sorted(set(size.graph_sizes)), "max_batch_size": 0}
    else:
        sizes = {"max_batch_size": size.max_running}
    return {CLASS: "CudaGraphConfig", "enable_padding": True, **sizes}


def build_sampling_params(
    version: str,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    max_tokens: int,
    stop_token_ids: Sequence[int],
    speculative: bool,
) -> dict[str, Any]:
    """Arguments of `SamplingParams` beside the seed. Raises ValueError.

    top-k and top-p are always passed (0 and 1: off), for without them the engine decodes greedily. Log-probs are
    never requested: with speculation there are none, and without it the engine's are not of the scaled logits that we
    mean; the actor computes them. `end_id` -1 with stop ids that stay in the output keeps the end token.
    """
    series(version)
    if speculative and min_p > 0:
        raise ValueError(f"min_p = {min_p}: not with speculation, whose sampler has no min_p")
    if temperature == 0:
        temperature, top_k, top_p, min_p = 1.0, 1, 1.0, 0.0
    params: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "max_tokens": max_tokens,
        "end_id": -1,
        "stop_token_ids": sorted(set(stop_token_ids)) or None,
        "include_stop_str_in_output": True,
        "detokenize": False,
    }
    return params | ({"min_p": min_p} if min_p > 0 else {})


def instantiate(value: Any, classes: Mapping[str, Any]) -> Any:
    """`value` with every marked map made an instance of its class in `classes`. Raises ValueError."""
    if isinstance(value, list):
        return [instantiate(item, classes) for item in value]
    if not isinstance(value, dict):
        return value
    made = {key: instantiate(item, classes) for key, item in value.items()}
    if CLASS not in made:
        return made
    name = made.pop(CLASS)
    if name not in classes:
        raise ValueError(f"this TensorRT-LLM has no {name}")
    return classes[name](**made)
