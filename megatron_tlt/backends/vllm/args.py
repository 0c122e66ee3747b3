"""Arguments of vLLM's engine and of one request, as plain data that crosses the socket. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.drafters.registry import KINDS
from megatron_tlt.models.decoders.base import ENGINE_DTYPES
from megatron_tlt.rollout.speculation.pre_rollouts import LONGEST

if TYPE_CHECKING:
    from megatron_tlt.config.model import ModelSection
    from megatron_tlt.config.rollout import RolloutSection
    from megatron_tlt.drafters.model import DrafterConfig
    from megatron_tlt.types import SamplingParams

# Of the GPU, which vLLM wants free before it starts. Nothing reads the share beside `kv_cache_memory_bytes`; the memory
# plan has made room for weights and cache, and policy and optimizer are there already.
_FREE_SHARE = 0.01
TOKEN_PROPOSER = "megatron_tlt.backends.vllm.plugin.adapter.TokenProposer"


def longest_draft(rollout: RolloutSection, drafter: DrafterConfig | None, takes_drafts: bool) -> int:
    """The most tokens that vLLM's proposer drafts for a request: all of a block, whatever of it is verified."""
    if drafter is not None and (fixed := KINDS[drafter.kind].draft_length(drafter)) is not None:
        return fixed
    own = rollout.speculation.longest_draft
    return max(own, LONGEST) if takes_drafts else own


def speculative_config(
    rollout: RolloutSection,
    drafter: DrafterConfig | None = None,
    directory: Path | None = None,
    takes_drafts: bool = False,
) -> dict[str, Any] | None:
    """vLLM's `speculative_config`; None without speculation. `directory`: that of the drafter's files. `takes_drafts`:
    requests may bring pre-rolled responses.

    The plugin decides how much each step drafts; vLLM gets the longest draft. With a range of batch sizes, one for all,
    it accepts drafts of other lengths; without one it pads a request's first draft with placeholder tokens.
    """
    longest = longest_draft(rollout, drafter, takes_drafts)
    if not longest:
        return None
    count: dict[str, Any] = {"num_speculative_tokens": longest}
    count["num_speculative_tokens_per_batch_size"] = [(1, rollout.max_running_requests, longest)]
    if drafter is None:
        return {"method": "custom_class", "model": TOKEN_PROPOSER, **count}
    return {
        "method": KINDS[drafter.kind].vllm_method(drafter),
        "model": str(directory),
        "draft_load_config": {"load_format": "safetensors"},
        **count,
    }


def engine_args(
    rollout: RolloutSection,
    model: ModelSection,
    cache_bytes: int,
    speculation: Mapping[str, Any] | None,
    device: str,
) -> dict[str, Any]:
    """Arguments of `vllm.EngineArgs` on a type of device.

    The policy's weights are dummies until the first weight sync, which brings them as every later one. No prefix cache:
    requests of one prompt would lack the hidden states of the part that they share. An engine that sleeps loses the
    policy's weights, and keeps the drafter's, which no weight sync has to bring.
    """
    is_eager = device != "cuda" or not rollout.graph_memory_mib
    # Hidden states are read while a forward runs, which a whole forward's graph would not do when it is replayed.
    compilation: dict[str, Any] = {} if is_eager else {"cudagraph_mode": "PIECEWISE"}
    if rollout.tp > 1:  # as `_tensor_parallel`: this all-reduce, too, opens the peers' memory, and is vLLM's own choice
        compilation["pass_config"] = {"fuse_allreduce_rms": False}
    # Of patterns that match no parameter vLLM refuses all but this one, so engines without a drafter may have it, too.
    sleep = {"enable_sleep_mode": True, "sleep_preserve_parameter_names": ["draft.*"]}
    arguments: dict[str, Any] = {
        "model": str(Path(model.path).resolve()),
        "load_format": "dummy",
        "dtype": ENGINE_DTYPES[rollout.dtype],
        "skip_tokenizer_init": True,
        "max_model_len": model.max_context,
        "max_num_seqs": rollout.max_running_requests,
        **_step_tokens(rollout, speculation),
        "kv_cache_memory_bytes": cache_bytes,
        **(_tensor_parallel(rollout.tp) if rollout.tp > 1 else {}),
        **({"gpu_memory_utilization": _FREE_SHARE} if device == "cuda" else {}),
        **(sleep if rollout.engine_sleeps(device) else {}),
        "enable_prefix_caching": False,
        "async_scheduling": False,  # a step's tokens are known before the next one is scheduled
        "disable_log_stats": True,
        "enforce_eager": is_eager,
        "compilation_config": compilation,
        "speculative_config": None if speculation is None else dict(speculation),
    }
    return {**arguments, **rollout.vllm.engine}


def _step_tokens(rollout: RolloutSection, speculation: Mapping[str, Any] | None) -> dict[str, int]:
    """The scheduler's budget of a step, and the rows of vLLM's buffers. For its proposer of blocks vLLM counts a block
    beside the tokens of each request that it schedules; other drafters' rows are not counted.
    """
    budget, counted = rollout.max_batched_tokens, 0
    if speculation is not None and speculation["method"] == "dflash":
        counted = rollout.max_running_requests * speculation["num_speculative_tokens"]
    return {"max_num_scheduled_tokens": budget, "max_num_batched_tokens": budget + counted}


def _tensor_parallel(size: int) -> dict[str, Any]:
    """Each rank's process is a worker of one engine: vLLM's workers join as ranks that a launcher has started. It then
    sees no GPU but its own, of which its own all-reduce wants the peers': NCCL reduces.
    """
    return {
        "tensor_parallel_size": size,
        "distributed_executor_backend": "external_launcher",
        "disable_custom_all_reduce": True,
    }


def launcher_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """How a process of one of `size` ranks on this machine finds the others, by torch's names: at the `port` of a
    store. Each sees one GPU, so reductions that open the others' memory are off.
    """
    return {
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 is a client of the store there, too
    }


def request_args(params: SamplingParams, eos_token_ids: Iterable[int]) -> dict[str, Any]:
    """What the requests of a `generate` share: their ends, and how our sampler draws."""
    ends = () if params.ignore_eos else eos_token_ids
    return {
        "max_tokens": params.max_tokens,
        "stop_token_ids": sorted({*ends, *params.stop_token_ids}),
        "stop": list(params.stop),
        "sampling": [params.temperature, params.top_k, params.top_p, params.min_p],
    }
