"""Rolling out with TensorRT-LLM, which runs in a process and a Python environment of its own."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from megatron_tlt.config.base import Section


class TrtllmSection(Section):
    """The TensorRT-LLM engine (`rollout.backend: trtllm`), experimental: it has run with a toy engine only.
    docs/guides/trtllm.md sets it up. Its responses depend on the machine's timing, with speculation and
    without, and have the same distribution."""

    python: str | None = None
    """Python executable of the environment with TensorRT-LLM. Required."""
    version: str = "1.2.1"
    """Version of TensorRT-LLM in it (1.2.x or 1.3.x); another one is refused."""
    transport: Literal["cuda_ipc", "shared_memory"] = "cuda_ipc"
    """How weights get there: handles of GPU memory or files in /dev/shm. Never chosen for you."""
    draft_len: PositiveInt = Field(default=4, le=32)
    """Tokens drafted in a row, the same for all requests."""
    kv_cache_fraction: float = Field(default=0.5, gt=0, lt=1)
    """Share of the GPU memory left beside the engine's weights that its KV cache takes."""
    sleep: Literal["none", "kv_cache"] = "kv_cache"
    """kv_cache: the KV cache's memory is given back from the end of a rollout to the next one's start."""
    heartbeat_s: PositiveFloat = 2.0
    """The engine's process gives a sign of life so often."""
    silence_s: PositiveFloat = 60.0
    """A process without a sign of life for so long is killed."""
    start_s: PositiveFloat = 1800.0
    """Longest start of the engine, in which it gives no sign."""
    engine: dict[str, bool | int | float | str | None] = Field(default_factory=dict)
    """More arguments of the engine by TensorRT-LLM's names, passed as they are."""
    environment: dict[str, str] = Field(default_factory=dict)
    """More environment variables of its process."""
