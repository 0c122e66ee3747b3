"""Rollout engines that run in a process and a Python environment of their own: vLLM, TensorRT-LLM.

A section has its engine's settings, their rules, and the facts that the memory plan needs beside `CAPABILITIES`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field, NonNegativeInt

from megatron_tlt.config.base import FilePath, Section
from megatron_tlt.config.drafter_kinds import vllm_layers_problem
from megatron_tlt.errors import ConfigProblem, Problems

if TYPE_CHECKING:
    from megatron_tlt.config.model import ArchitectureConfig
    from megatron_tlt.config.root import Config


# Arguments of vLLM that settings of other names give, and these settings.
_VLLM_ARGUMENTS = {
    "tensor_parallel_size": "rollout.tp has the ranks of an engine",
    "pipeline_parallel_size": "rollout.tp has the ranks of an engine",
    "data_parallel_size": "each rollout.tp ranks are an engine of their own",
    "seed": "train.seed has the seed of responses",
    "worker_extension_cls": "this project's plugin is it",
}


class EngineProcessSection(Section):
    """What all of them have."""

    loads_experts_whole: ClassVar[bool] = False  # a weight sync has all experts of a layer twice
    gathers_logits: ClassVar[bool] = False  # every rank has all logits, and draws from them in chunks
    sleeps: ClassVar[bool] = False  # `release_cache` also gives weights back, on CUDA only
    note: ClassVar[str | None] = None  # a line of `check`'s report

    python: str | None
    engine: dict[str, bool | int | float | str | None] = Field(default_factory=dict)
    """More arguments of the engine by its own names, passed as they are."""

    def problems(self, config: Config, shape: ArchitectureConfig | None, device: str | None) -> Problems:
        """Settings that the engine cannot run with, beyond its `BackendCapabilities`."""
        yield from ()


class VllmSection(EngineProcessSection):
    """The vLLM engine (`rollout.backend: vllm`); `make setup-vllm` makes its environment, with vLLM's GPU
    build beside a GPU and with its CPU build elsewhere. It samples with this project's noise, so a response depends on
    seed and policy only, with any drafter and with none (docs/reference/engines.md)."""

    loads_experts_whole = gathers_logits = sleeps = True
    kv_block: ClassVar[int] = 128  # tokens: vLLM's own block of the cache on CPUs, a multiple of those on GPUs

    python: Annotated[str | None, FilePath()] = None
    """Python executable of the environment with vLLM, 0.32.x. Default: that of .venv/vllm (`make setup-vllm`), beside
    the package."""
    hidden_mib: NonNegativeInt = 1024
    """Memory for hidden states of running responses, in the engine's process, where each takes that of the longest
    request: requests that find none left are not trained on. A drafter of kind eagle3 needs four times the bytes of one
    of kind eagle."""

    def problems(self, config: Config, shape: ArchitectureConfig | None, device: str | None) -> Problems:
        for name, instead in _VLLM_ARGUMENTS.items():
            if name in self.engine:
                yield ConfigProblem(f"rollout.vllm.engine.{name}", self.engine[name], f"must not be set: {instead}")
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

    note = "TensorRT-LLM engines are experimental: they have run around a toy engine only (docs/guides/trtllm.md)"

    python: Annotated[str | None, FilePath()] = None
    """Python executable of the environment with TensorRT-LLM, 1.2.x or 1.3.x. Required."""
    kv_cache_fraction: float = Field(default=0.5, gt=0, lt=1)
    """Share of the GPU memory left beside the engine's weights that its KV cache takes."""

    def problems(self, config: Config, shape: ArchitectureConfig | None, device: str | None) -> Problems:
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
