"""Rollout engines that run in a process and a Python environment of their own: vLLM, TensorRT-LLM.

A section has its engine's settings, their rules, and the facts that the memory plan needs beside `CAPABILITIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field, JsonValue, NonNegativeInt

from megatron_tlt.config.base import FilePath, Section
from megatron_tlt.config.drafter_kinds import vllm_layers_problem
from megatron_tlt.errors import ConfigProblem, Problems

if TYPE_CHECKING:
    from megatron_tlt.config.model import ArchitectureConfig
    from megatron_tlt.config.root import Config


# Arguments of vLLM that settings of other names give, or that must be as they are, and why.
_VLLM_ARGUMENTS = {
    "model": "model.path has the policy",
    "dtype": "rollout.dtype has the type",
    "max_model_len": "data.max_prompt_tokens and rollout.max_tokens have the longest sequence",
    "max_num_seqs": "rollout.max_running_requests has the most requests",
    "max_num_batched_tokens": "rollout.max_batched_tokens has the tokens of a step",
    "max_num_scheduled_tokens": "rollout.max_batched_tokens has the tokens of a step",
    "kv_cache_memory_bytes": "rollout.kv_cache_mib has the size of the KV cache",
    "gpu_memory_utilization": "rollout.kv_cache_mib has the size of the KV cache, in MiB",
    "enable_sleep_mode": "rollout.release_cache turns it on",
    "sleep_preserve_parameter_names": "rollout.release_cache sets it",
    "enforce_eager": "rollout.graph_memory_mib = 0 turns graphs off",
    "compilation_config": "rollout.graph_memory_mib = 0 turns graphs off; the plugin needs the rest as it is",
    "speculative_config": "rollout.speculation has the drafter",
    "tensor_parallel_size": "rollout.tp has the ranks of an engine",
    "pipeline_parallel_size": "rollout.tp has the ranks of an engine",
    "data_parallel_size": "each rollout.tp ranks are an engine of their own",
    "distributed_executor_backend": "this program's ranks are the workers",
    "disable_custom_all_reduce": "a rank sees no GPU but its own, so it is off",
    "seed": "train.seed has the seed of responses",
    "worker_extension_cls": "this project's plugin is it",
    "load_format": "the first weight sync brings the weights",
    "skip_tokenizer_init": "prompts and responses are token ids",
    "enable_prefix_caching": "it is off: a prompt that is shared would have hidden states once",
    "async_scheduling": "it is off: a step's tokens are known before the next one is scheduled",
    "disable_log_stats": "they are off: metrics.jsonl has the figures of rollouts",
}
# The same of TensorRT-LLM.
_TRTLLM_ARGUMENTS = {
    "model": "model.path has the policy",
    "dtype": "rollout.dtype has the type",
    "max_seq_len": "model.max_context has the longest sequence",
    "max_input_len": "model.max_context has the longest sequence",
    "max_batch_size": "rollout.max_running_requests has the most requests",
    "max_num_tokens": "rollout.max_batched_tokens has the tokens of a step",
    "kv_cache_config": "rollout.trtllm.kv_cache_fraction has the share of the KV cache",
    "cuda_graph_config": "rollout.graph_memory_mib = 0 turns graphs off",
    "speculative_config": "rollout.speculation has the drafter",
    "enable_sleep": "rollout.release_cache turns it on",
    "sleep_config": "rollout.release_cache turns it on",
    "tensor_parallel_size": "each rank is an engine of its own",
    "backend": "it is pytorch, whose weights a weight sync can set",
    "ray_worker_extension_cls": "this project's extension is it",
    "skip_tokenizer_init": "prompts and responses are token ids",
    "enable_chunked_prefill": "it is on: prompts may be longer than rollout.max_batched_tokens",
    "enable_iter_perf_stats": "it is on: metrics.jsonl has the figures of rollouts",
}


class EngineProcessSection(Section):
    """What all of them have."""

    loads_experts_whole: ClassVar[bool] = False  # a weight sync has all experts of a layer twice
    gathers_logits: ClassVar[bool] = False  # every rank has all logits, and draws from them in chunks
    sleeps: ClassVar[bool] = False  # `release_cache` also gives weights back, on CUDA only
    note: ClassVar[str | None] = None  # a line of `check`'s report
    taken: ClassVar[Mapping[str, str]] = MappingProxyType({})  # arguments that `engine` cannot have, and why

    python: str | None
    engine: dict[str, JsonValue] = Field(default_factory=dict)
    """More arguments of the engine by its own names, passed as they are. `check` refuses those that other settings
    give."""

    def problems(self, config: Config, shape: ArchitectureConfig | None, device: str | None) -> Problems:
        """Settings that the engine cannot run with, beyond its `BackendCapabilities`."""
        for name in sorted(self.engine.keys() & self.taken.keys()):
            path = f"rollout.{config.rollout.backend}.engine.{name}"
            yield ConfigProblem(path, self.engine[name], f"must not be set: {self.taken[name]}")


class VllmSection(EngineProcessSection):
    """The vLLM engine (`rollout.backend: vllm`); `make setup-vllm` makes its environment, with vLLM's GPU
    build beside a GPU and with its CPU build elsewhere. It samples with this project's noise, so a response depends on
    seed and policy only, with any drafter and with none (docs/reference/engines.md)."""

    loads_experts_whole = gathers_logits = sleeps = True
    taken = MappingProxyType(_VLLM_ARGUMENTS)
    kv_block: ClassVar[int] = 128  # tokens: vLLM's own block of the cache on CPUs, a multiple of those on GPUs

    python: Annotated[str | None, FilePath()] = None
    """Python executable of the environment with vLLM, 0.32.x. Default: that of .venv/vllm (`make setup-vllm`), beside
    the package."""
    hidden_mib: NonNegativeInt = 1024
    """Memory for hidden states of running responses, in the engine's process, where each takes that of the longest
    request: requests that find none left are not trained on. A drafter of kind eagle3 needs four times the bytes of one
    of kind eagle."""

    def problems(self, config: Config, shape: ArchitectureConfig | None, device: str | None) -> Problems:
        yield from super().problems(config, shape, device)
        speculation = config.rollout.speculation
        has_bandit = speculation.drafter != "none" and speculation.selector == "beg_mab"
        if has_bandit and set(speculation.bandit.arms) == {0}:
            allowed = "must have an arm that drafts with rollout.backend: vllm (none drafts: drafter: none)"
            yield ConfigProblem("rollout.speculation.bandit.arms", speculation.bandit.arms, allowed)
        if config.rollout.numerics == "invariant" and device == "cpu":
            allowed = "must be 'default' on CPU with rollout.backend: vllm, whose batch-invariant mode needs Triton"
            yield ConfigProblem("rollout.numerics", "invariant", allowed)
        least = 1  # MiB: those of one request
        if shape is not None:
            state = speculation.state_parts * shape.hidden_size * (4 if config.rollout.dtype == "fp32" else 2)
            least = -(-config.longest_sequence * state // 2**20)
        if config.idle.train_drafter and config.hidden_states_of == "engine" and self.hidden_mib < least:
            allowed = f"must be >= {least} with idle.train_drafter: a request of full length, or nothing is trained on"
            yield ConfigProblem("rollout.vllm.hidden_mib", self.hidden_mib, allowed)
        if shape is not None and speculation.state_parts > 1 and (problem := vllm_layers_problem(shape.family)):
            allowed = f"must be none, suffix or eagle with rollout.backend: vllm: {problem}"
            yield ConfigProblem("rollout.speculation.drafter", speculation.drafter, allowed)


class TrtllmSection(EngineProcessSection):
    """The TensorRT-LLM engine (`rollout.backend: trtllm`), experimental: it has run with a toy engine only.
    docs/guides/trtllm.md sets it up. Its responses depend on the machine's timing, with speculation and without, and
    have the same distribution."""

    taken = MappingProxyType(_TRTLLM_ARGUMENTS)
    note = "TensorRT-LLM engines are experimental: they have run around a toy engine only (docs/guides/trtllm.md)"

    python: Annotated[str | None, FilePath()] = None
    """Python executable of the environment with TensorRT-LLM, 1.2.x or 1.3.x. Required."""
    kv_cache_fraction: float = Field(default=0.5, gt=0, lt=1)
    """Share of the GPU memory left beside the engine's weights that its KV cache takes."""

    def problems(self, config: Config, shape: ArchitectureConfig | None, device: str | None) -> Problems:
        yield from super().problems(config, shape, device)
        rollout = config.rollout
        if rollout.numerics != "default":
            allowed = "must be 'default' with rollout.backend: trtllm, whose responses depend on the batch"
            yield ConfigProblem("rollout.numerics", rollout.numerics, allowed)
        if self.python is None:
            allowed = "is required with rollout.backend: trtllm: the Python executable of its environment"
            yield ConfigProblem("rollout.trtllm.python", None, allowed)
        for field, min_p in (("rollout.min_p", rollout.min_p), ("eval.min_p", config.eval.min_p)):
            if rollout.speculation.trained and min_p:
                yield ConfigProblem(field, min_p, "must be 0 with speculation, whose sampler has no min_p")
        if rollout.kv_cache_mib is not None:
            allowed = "must be null with rollout.backend: trtllm: use rollout.trtllm.kv_cache_fraction"
            yield ConfigProblem("rollout.kv_cache_mib", rollout.kv_cache_mib, allowed)
        if shape is not None and shape.num_experts:
            allowed = "must be 'embedded' or 'vllm' for experts: a weight sync sends a layer's experts as one tensor"
            yield ConfigProblem("rollout.backend", "trtllm", allowed)
