"""The rollout engine and how it samples."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import MinLen
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from megatron_tlt.config.base import Section
from megatron_tlt.config.engine_process import EngineProcessSection, TrtllmSection, VllmSection
from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.types import BackendName

KV_BLOCK = 16  # tokens of a block of the KV cache: a tile of the native decoder, a page of the Triton kernels
_LEAST_VERIFY_ROWS = 512  # few requests with the longest drafts, too


class RolloutSection(Section):
    """Sampling of responses and the engine that does it."""

    backend: BackendName = "embedded"
    """Rollout engine. embedded: ours, in the training process. trtllm, vllm: TensorRT-LLM and
    vLLM, in a process of their own."""
    tp: PositiveInt = 1
    """Tensor parallel size of one engine replica; ranks / tp replicas."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Weights and KV cache of the engine."""
    kernels: Literal["auto", "native", "torch"] = "auto"
    """Who computes: the native C decoder (CPU) or plain PyTorch. auto: native on CPU, which needs a C
    compiler on every node; on CUDA PyTorch with Triton's kernels."""
    samples_per_prompt: PositiveInt = 8
    """Responses to each prompt (the group size n)."""
    temperature: NonNegativeFloat = 1.0
    """Softmax temperature; the update scores at the same temperature."""
    top_k: NonNegativeInt = 0
    """Keep the k most likely tokens; 0: off."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass; 1: off."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Drop tokens below min_p times the most likely one's probability; 0: off."""
    max_tokens: PositiveInt = 1024
    """Longest response in tokens."""
    carry_over: PositiveInt | None = None
    """Partial rollouts: the most tokens of a response in one step; the next step continues unfinished responses under
    its policy (docs/guides/carry_over.md). Default: a step finishes its responses."""
    stop: tuple[Annotated[str, MinLen(1)], ...] = ()
    """Strings that end a response (kept in it)."""
    kv_cache_mib: PositiveInt | None = None
    """KV-cache memory of one rank; default: what max_running_requests need, on CUDA at most what the memory plan leaves
    of cluster.memory_gib (`check` prints it)."""
    release_cache: bool = False
    """Give the memory of the KV cache back whenever no rollout runs (responses stay the same). Captured graphs stay: on
    CUDA the cache comes back at its address. vLLM, on CUDA only, gives its weights back, too, until the weight sync."""
    max_running_requests: PositiveInt = 256
    """Most requests decoded in one forward."""
    max_batched_tokens: PositiveInt = 2048
    """Token budget of one forward; longer prompts are prefilled in chunks."""
    numerics: Literal["default", "invariant"] = "default"
    """invariant: a row's result does not depend on the rows that share its forward, bit for bit. The native decoder
    always computes so; the PyTorch decoder pays for it with fixed tiles (on CUDA with Triton's kernels in graphs, else
    16 rows at a time). With vllm its batch-invariant mode, on GPUs of compute capability 8.0 and above: other requests
    of a batch change nothing, drafts may (docs/design/numerics.md)."""
    graph_memory_mib: NonNegativeInt = 2048
    """On CUDA, decoding and verifying steps run as captured graphs (Triton's kernels): device memory of
    graphs and their buffers, taken at the engine's start and kept; steps that have no room in it run without one,
    and are counted. 0: no graphs, with any engine."""
    schedule: Literal["pull", "static"] = "pull"
    """How prompts come to R replicas. pull: a replica with room in its engine fetches the next prompt from a counter
    that all replicas share. static (always with trtllm, which has no keyed sampling): every R-th prompt, dealt out
    before the rollout."""
    speculation: SpeculationSection = SpeculationSection()
    """Speculative decoding, as far as the engine takes it (docs/reference/engines.md)."""
    trtllm: TrtllmSection = TrtllmSection()
    """The TensorRT-LLM engine."""
    vllm: VllmSection = VllmSection()
    """The vLLM engine."""

    @property
    def engine_process(self) -> EngineProcessSection | None:
        """The section of an engine in a process of its own; None: the engine is in the rank."""
        section: EngineProcessSection | None = getattr(self, self.backend, None)
        return section

    @property
    def cache_share(self) -> float | None:
        """Share of a GPU's free memory that the engine takes for its KV cache at its start; None: it gets bytes."""
        share: float | None = getattr(self.engine_process, "kv_cache_fraction", None)
        return share

    def engine_sleeps(self, device: str) -> bool:
        """Whether the engine gives back its KV cache between rollouts, and its weights from the last rollout of a step
        to the weight sync.
        """
        process = self.engine_process
        return process is not None and process.sleeps and self.release_cache and device == "cuda"

    def releases_cache(self, device: str) -> bool:
        """Whether the KV cache is there in rollouts only."""
        process = self.engine_process
        return self.engine_sleeps(device) if process is not None and process.sleeps else self.release_cache

    @property
    def kv_cache_bytes(self) -> int | None:
        """`kv_cache_mib` in bytes."""
        return None if self.kv_cache_mib is None else self.kv_cache_mib << 20

    @property
    def verify_rows(self) -> int:
        """Rows of the largest verifying forward that runs as a captured graph: all requests with five drafted tokens
        each, or fewer requests with more.
        """
        return max(_LEAST_VERIFY_ROWS, 6 * self.max_running_requests)


class SyncSection(Section):
    """The weight sync: new weights into the rollout engines."""

    bucket_mib: PositiveInt = 256
    """Size of one bucket: the peak extra memory of a weight sync."""
    verify: bool = False
    """Compare checksums of every tensor on both sides and fail loudly."""
    transport: Literal["auto", "cuda_ipc", "shared_memory"] = "auto"
    """How weights get to an engine in a process of its own: handles of GPU memory (auto: on CUDA) or files in /dev/shm
    (auto: on CPU)."""

    def by_handles(self, device: str) -> bool:
        """Whether `transport` on a device of this type is cuda_ipc."""
        return self.transport == "cuda_ipc" or (self.transport == "auto" and device == "cuda")
