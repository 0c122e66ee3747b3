"""Rolling out with vLLM, which runs in a process and a Python environment of its own."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from megatron_tlt.config.base import Section


class VllmSection(Section):
    """The vLLM engine (`rollout.backend: vllm`); `make setup-vllm` makes its environment. It samples with this
    project's noise, so a response depends on seed and policy only, with any drafter and with none
    (docs/reference/engines.md)."""

    python: str | None = None
    """Python executable of the environment with vLLM. Default: that of .venv/vllm (`make setup-vllm`), or else of
    .venv/peers-vllm (`make bench-vllm`), beside the package."""
    version: str = "0.32.0"
    """Version of vLLM in it; another one is refused."""
    transport: Literal["shared_memory", "cuda_ipc"] = "shared_memory"
    """How weights get there: files in /dev/shm or handles of GPU memory."""
    hidden_mib: NonNegativeInt = 1024
    """Memory for hidden states of running responses, in the engine's process: requests that find none left are not
    trained on. A drafter of kind eagle3 needs four times the bytes of one of kind eagle."""
    heartbeat_s: PositiveFloat = 0.5
    """The engine's process gives a sign of life, with the lengths of running responses, so often."""
    silence_s: PositiveFloat = 120.0
    """A process without a sign of life for so long is killed."""
    start_s: PositiveFloat = 900.0
    """Longest start of the engine, in which it gives no sign."""
    engine: dict[str, bool | int | float | str | None] = Field(default_factory=dict)
    """More arguments of the engine by vLLM's names (`EngineArgs`), passed as they are."""
    environment: dict[str, str] = Field(default_factory=dict)
    """More environment variables of its process."""
