"""Rollout engines that run in a process and a Python environment of their own: vLLM, TensorRT-LLM."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt

from megatron_tlt.config.base import FilePath, Section


class EngineProcessSection(Section):
    """What both engines have."""

    python: str | None
    engine: dict[str, bool | int | float | str | None] = Field(default_factory=dict)
    """More arguments of the engine by its own names, passed as they are."""


class VllmSection(EngineProcessSection):
    """The vLLM engine (`rollout.backend: vllm`); `make setup-vllm` makes its environment, with vLLM's GPU
    build beside a GPU and with its CPU build elsewhere. It samples with this project's noise, so a response depends on
    seed and policy only, with any drafter and with none (docs/reference/engines.md)."""

    python: Annotated[str | None, FilePath()] = None
    """Python executable of the environment with vLLM, 0.32.x. Default: that of .venv/vllm (`make setup-vllm`), or else
    of .venv/peers-vllm (`make bench-vllm`), beside the package."""
    hidden_mib: NonNegativeInt = 1024
    """Memory for hidden states of running responses, in the engine's process: requests that find none left are not
    trained on. A drafter of kind eagle3 needs four times the bytes of one of kind eagle."""


class TrtllmSection(EngineProcessSection):
    """The TensorRT-LLM engine (`rollout.backend: trtllm`), experimental: it has run with a toy engine only.
    docs/guides/trtllm.md sets it up. Its responses depend on the machine's timing, with speculation and without, and
    have the same distribution."""

    python: Annotated[str | None, FilePath()] = None
    """Python executable of the environment with TensorRT-LLM, 1.2.x or 1.3.x. Required."""
    kv_cache_fraction: float = Field(default=0.5, gt=0, lt=1)
    """Share of the GPU memory left beside the engine's weights that its KV cache takes."""
