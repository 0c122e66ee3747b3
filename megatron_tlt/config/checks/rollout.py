"""Cross-checks of the rollout engine: kernels, memory, context, and drafter training in idle time."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_tlt.config.checks.layout import Device, check_nodes, tp_problems
from megatron_tlt.config.drafter_kinds import DRAFTERS
from megatron_tlt.config.model import ArchitectureConfig
from megatron_tlt.config.planning.parameters import kv_bytes_per_token
from megatron_tlt.config.root import Config
from megatron_tlt.config.speculation import check_speculation
from megatron_tlt.errors import ConfigProblem
from megatron_tlt.types import CAPABILITIES

Problems = Iterator[ConfigProblem]


def check_rollout(
    config: Config, shape: ArchitectureConfig | None, num_ranks: int, device: Device | None
) -> Problems:
    """The engine's layout, kernels and memory."""
    rollout = config.rollout
    if num_ranks % rollout.tp:
        yield ConfigProblem("rollout.tp", rollout.tp, f"must divide the number of ranks ({num_ranks})")
    yield from tp_problems(shape, "rollout.tp", rollout.tp)
    yield from check_nodes(config, "rollout.tp", rollout.tp)
    if rollout.kernels == "native" and device == "cuda":
        yield ConfigProblem(
            "rollout.kernels", "native", "must be 'auto' or 'torch' on CUDA: native kernels are for CPU"
        )
    if rollout.kernels == "native" and rollout.dtype != "fp32":
        allowed = "must be 'auto' or 'torch' with rollout.dtype: bf16: the native decoder computes fp32"
        yield ConfigProblem("rollout.kernels", "native", allowed)
    if rollout.max_running_requests > rollout.max_batched_tokens:
        most = rollout.max_batched_tokens
        allowed = f"must be <= rollout.max_batched_tokens ({most}): each request decodes one token"
        yield ConfigProblem("rollout.max_running_requests", rollout.max_running_requests, allowed)
    yield from check_speculation(rollout.speculation, has_drafter=config.idle.train_drafter)
    if shape is not None:
        if shape.num_experts:
            yield from _check_experts(config, shape)
        yield from _check_kv_cache(config, shape)
        if rollout.top_k > shape.vocab_size:
            yield ConfigProblem(
                "rollout.top_k", rollout.top_k, f"must be <= the vocabulary ({shape.vocab_size})"
            )


def _check_experts(config: Config, shape: ArchitectureConfig) -> Problems:
    """Engines to which a weight sync does not bring experts, or that hand out no layers' outputs of such a model."""
    backend = config.rollout.backend
    if backend == "trtllm":
        allowed = "must be 'embedded' or 'vllm' for experts: a weight sync sends a layer's experts as one tensor"
        yield ConfigProblem("rollout.backend", backend, allowed)
    drafter = config.rollout.speculation.drafter
    reads_layers = config.rollout.speculation.state_parts > 1
    if backend == "vllm" and reads_layers and shape.family != "qwen3_moe":
        allowed = f"reads layers of the policy, which vLLM does not hand out for a {shape.family} policy"
        yield ConfigProblem("rollout.speculation.drafter", drafter, allowed)


def _check_kv_cache(config: Config, shape: ArchitectureConfig) -> Problems:
    """One request of full length must fit, or the engine could never finish it."""
    rollout = config.rollout
    if rollout.kv_cache_mib is None or shape.num_kv_heads % rollout.tp:
        return
    blocks = -(-longest_request(config) // rollout.block_size)
    needed = -(-blocks * rollout.block_size * kv_bytes_per_token(config, shape) // 2**20)
    if rollout.kv_cache_mib < needed:
        allowed = f"must be >= {needed} MiB, or the longest request does not fit"
        yield ConfigProblem("rollout.kv_cache_mib", rollout.kv_cache_mib, allowed)


def longest_request(config: Config) -> int:
    """Tokens of the longest prompt and response together, training or evaluation."""
    response = max(config.rollout.max_tokens, config.eval.max_tokens or 0)
    return config.data.max_prompt_tokens + response


def check_idle(config: Config, shape: ArchitectureConfig | None, num_ranks: int, device: Device | None) -> Problems:
    """Training the drafter needs a trainable drafter, at least two replicas, and room for hidden states."""
    yield from _check_kind(config)
    if not config.idle.train_drafter:
        return
    section, online = config.rollout.speculation, config.drafter.online
    if section.trained is None:
        kinds = " or ".join(map(repr, DRAFTERS))
        allowed = f"needs rollout.speculation.drafter {kinds}: {section.drafter!r} has nothing to train"
        yield ConfigProblem("idle.train_drafter", True, allowed)
    elif _never_trains(config, num_ranks) and section.drafter_path is None:
        allowed = (
            "is required with one rollout replica: it has no idle time, so random weights would stay random (or "
            "idle.min_steps_per_window above 0, or rollout.speculation.drafter=suffix or none with "
            "idle.train_drafter=false)"
        )
        yield ConfigProblem("rollout.speculation.drafter_path", None, allowed)
    yield from _check_hidden_states(config)
    if online.fp8 == "te" and device == "cpu":
        yield ConfigProblem("drafter.online.fp8", online.fp8, "must be 'off' on CPU")
    if shape is not None:
        size = section.state_parts * shape.hidden_size * (4 if config.rollout.dtype == "fp32" else 2) + 8
        sizes = config.drafter.sizes(device or "cpu")
        needed = min(config.drafter.window, sizes.micro_step_tokens) * size / 2**20
        if sizes.buffer_mib < needed:
            allowed = f"must be >= {needed:.2f}, or no long response fits"
            yield ConfigProblem("drafter.online.buffer_mib", sizes.buffer_mib, allowed)


def _check_hidden_states(config: Config) -> Problems:
    """Their source: an engine that has them, or an actor that can give them to the ranks that train."""
    at, chosen = "drafter.online.hidden_states", config.drafter.online.hidden_states
    if config.hidden_states_of == "engine":
        if not CAPABILITIES[config.rollout.backend].hidden_states:
            allowed = f"must be 'actor' or 'auto' with rollout.backend: {config.rollout.backend}, which gives none"
            yield ConfigProblem(at, chosen, allowed)
        return
    if config.rollout.tp > 1:
        allowed = "must be 'engine' with rollout.tp above 1: ranks of one engine train on the same responses"
        yield ConfigProblem(at, chosen, allowed)
    if config.drafter.online.max_age == 0:
        allowed = f"must be above 0 with {at} = {chosen}: the actor's hidden states are of the step before"
        yield ConfigProblem("drafter.online.max_age", 0, allowed)


def _check_kind(config: Config) -> Problems:
    """Settings that the kind of drafter does not have, and what a drafter made from the policy cannot have."""
    section, at = config.rollout.speculation, "rollout.speculation"
    for name, has in (("layers", "layers_read"), ("draft_vocab_size", "has_own_head")):
        value, kind = getattr(section, name), section.trained
        if kind is not None and value is not None and not getattr(kind, has):
            kinds = ", ".join(facts.name for facts in DRAFTERS.values() if getattr(facts, has))
            allowed = f"must be null with drafter: {kind.name}; a drafter that has it: {kinds}"
            yield ConfigProblem(f"{at}.{name}", value, allowed)
    is_fresh = config.idle.train_drafter and section.drafter_path is None
    if is_fresh and section.draft_vocab_size is not None:
        allowed = f"must be null without {at}.drafter_path: megatron-tlt drafter train chooses the tokens"
        yield ConfigProblem(f"{at}.draft_vocab_size", section.draft_vocab_size, allowed)


def _never_trains(config: Config, num_ranks: int) -> bool:
    """Whether there is no idle time (one replica) and no configured micro-step either."""
    return num_ranks // config.rollout.tp == 1 and config.idle.min_steps_per_window == 0


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
        yield ConfigProblem(
            "model.max_context", max_context, f"must be <= the model's {max_positions} positions"
        )
