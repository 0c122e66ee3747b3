"""Cross-checks of the rollout engine: layout, kernels, memory and context."""

from __future__ import annotations

from megatron_tlt.config.checks.layout import GROUPED, Device, check_nodes, tp_problems, ungrouped_sizes
from megatron_tlt.config.model import ArchitectureConfig
from megatron_tlt.config.planning.engine import least_cache_bytes
from megatron_tlt.config.root import Config
from megatron_tlt.errors import ConfigProblem, Problems

NATIVE_HEAD_DIM = 256  # most of the native decoder: TLT_MAX_HEAD_DIM of its csrc/tlt.h


def check_rollout(config: Config, shape: ArchitectureConfig | None, num_ranks: int, device: Device | None) -> Problems:
    """The engine's layout, kernels and memory."""
    rollout = config.rollout
    if num_ranks % rollout.tp:
        yield ConfigProblem("rollout.tp", rollout.tp, f"must divide the number of ranks ({num_ranks})")
    yield from tp_problems(shape, "rollout.tp", rollout.tp)
    yield from check_nodes(config, "rollout.tp", rollout.tp)
    yield from _check_native(config, shape, device)
    if rollout.max_running_requests > rollout.max_batched_tokens:
        most = rollout.max_batched_tokens
        allowed = f"must be <= rollout.max_batched_tokens ({most}): each request decodes one token"
        yield ConfigProblem("rollout.max_running_requests", rollout.max_running_requests, allowed)
    if shape is not None:
        if shape.num_experts:
            yield from _check_grouped(config, shape, device)
        yield from _check_kv_cache(config, shape)
        for field, top_k in (("rollout.top_k", rollout.top_k), ("eval.top_k", config.eval.top_k)):
            if top_k is not None and top_k > shape.vocab_size:
                yield ConfigProblem(field, top_k, f"must be <= the vocabulary ({shape.vocab_size})")


def _check_native(config: Config, shape: ArchitectureConfig | None, device: Device | None) -> Problems:
    """The native decoder: CPU only, with limits of its own."""
    rollout = config.rollout
    if rollout.kernels == "native" and device == "cuda":
        allowed = "must be 'auto' or 'torch' on CUDA: native kernels are for CPU"
        yield ConfigProblem("rollout.kernels", "native", allowed)
    if not _is_native(config, device):
        return
    if shape is not None and shape.head_dim > NATIVE_HEAD_DIM:
        allowed = f"must be 'torch' for heads of {shape.head_dim}: the native decoder has at most {NATIVE_HEAD_DIM}"
        yield ConfigProblem("rollout.kernels", rollout.kernels, allowed)


def _is_native(config: Config, device: Device | None) -> bool:
    """Whether the embedded engine takes the native decoder. Ranks whose device is not known are taken for CPU ranks."""
    rollout = config.rollout
    if rollout.backend != "embedded" or rollout.kernels == "torch":
        return False
    return rollout.kernels == "native" or device != "cuda"


def _check_grouped(config: Config, shape: ArchitectureConfig, device: Device | None) -> Problems:
    """Sizes of experts that the PyTorch decoder's grouped products refuse."""
    rollout = config.rollout
    if rollout.backend != "embedded" or _is_native(config, device):
        return
    for name, size, step in ungrouped_sizes(shape, rollout.dtype, rollout.tp):
        allowed = f"must leave the {name} ({size}) a multiple of {step} on each rank: {GROUPED}"
        yield ConfigProblem("rollout.tp", rollout.tp, allowed)


def _check_kv_cache(config: Config, shape: ArchitectureConfig) -> Problems:
    """One request of full length must fit, or the engine could never finish it."""
    rollout = config.rollout
    if rollout.kv_cache_mib is None or shape.num_kv_heads % rollout.tp:
        return
    needed = -(-least_cache_bytes(config, shape) // 2**20)
    if rollout.kv_cache_mib < needed:
        allowed = f"must be >= {needed} MiB, or the longest request does not fit"
        yield ConfigProblem("rollout.kv_cache_mib", rollout.kv_cache_mib, allowed)


def check_context(config: Config, max_positions: int | None) -> Problems:
    """Prompt + response <= model.max_context <= what the model was made for."""
    limit, prompt = config.model.max_context, config.data.max_prompt_tokens
    for path, response in (("rollout", config.rollout.max_tokens), ("eval", config.eval.max_tokens)):
        if response is not None and prompt + response > limit:
            value = f"{prompt} + {response} = {prompt + response}"
            yield ConfigProblem(
                f"data.max_prompt_tokens + {path}.max_tokens",
                value,
                f"must be <= model.max_context ({limit})",
            )
    yield from check_positions(limit, max_positions)


def check_positions(max_context: int, max_positions: int | None) -> Problems:
    if max_positions is not None and max_context > max_positions:
        yield ConfigProblem("model.max_context", max_context, f"must be <= the model's {max_positions} positions")
