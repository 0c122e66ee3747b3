"""Cross-checks that need no weights: does the layout fit the world, the model and the data?

Every check yields all its problems; nothing raises but `raise_problems`. The model comes
as an `interfaces.ModelShape`, so that this floor knows no model code; None skips the checks that need it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from megatron_tlt.config.checks.backend import check_backend
from megatron_tlt.config.checks.learning import check_algorithm, check_data, check_optimizer, check_rewards
from megatron_tlt.config.root import Config, SftConfig
from megatron_tlt.config.speculation import check_speculation
from megatron_tlt.errors import ConfigError, ConfigProblem
from megatron_tlt.interfaces import ModelShape

Device = Literal["cpu", "cuda"]
Problems = Iterator[ConfigProblem]


def check_config(
    config: Config,
    shape: ModelShape | None,
    num_ranks: int,
    device: Device | None = None,
    max_positions: int | None = None,
) -> list[ConfigProblem]:
    """All problems of an RL run on `num_ranks` ranks; an empty list means it can run.

    `device` is what the ranks will use (None: `distributed.device`, unknown if that is auto); `max_positions` the
    longest context the model was made for, in tokens.
    """
    device = resolve_device(config, device)
    shape = shape if shape is not None else config.model.architecture
    return [
        *check_world(config, num_ranks, device),
        *tp_problems(shape, "actor.tp", config.actor.tp),
        *pp_problems(shape, "actor.pp", config.actor.pp),
        *_check_architecture(config, shape),
        *check_rollout(config, shape, num_ranks, device),
        *check_idle(config, shape, num_ranks, device),
        *check_backend(config, device),
        *check_batch(config, num_ranks),
        *check_context(config, max_positions),
        *check_algorithm(config),
        *check_data(config),
        *check_rewards(config),
        *check_optimizer(config.optimizer, config.train.num_steps * config.algorithm.mini_batches),
        *check_stop(config),
        *check_watchdog(config),
    ]


def check_sft(
    config: SftConfig,
    shape: ModelShape | None,
    num_ranks: int,
    device: Device | None = None,
    max_positions: int | None = None,
) -> list[ConfigProblem]:
    """All problems of a fine-tuning run; arguments as in `check_config`."""
    device = resolve_device(config, device)
    shape = shape if shape is not None else config.model.architecture
    return [
        *check_world(config, num_ranks, device),
        *tp_problems(shape, "actor.tp", config.actor.tp),
        *pp_problems(shape, "actor.pp", config.actor.pp),
        *_check_architecture(config, shape),
        *_check_positions(config.model.max_context, max_positions),
        *check_optimizer(config.optimizer, config.sft.num_steps),
    ]


def raise_problems(problems: list[ConfigProblem]) -> None:
    """Raises one ConfigError with all problems, if there are any."""
    if problems:
        raise ConfigError(problems)


def resolve_device(config: Config | SftConfig, device: Device | None) -> Device | None:
    """The device to check for: the caller's, else the configured one; None where that is auto."""
    configured = config.distributed.device
    return device if device is not None or configured == "auto" else configured


def check_world(config: Config | SftConfig, num_ranks: int, device: Device | None) -> Problems:
    """Ranks = tp * pp * cp * dp, and what each dimension needs."""
    actor = config.actor
    block = actor.tp * actor.pp * actor.cp
    if num_ranks % block:
        allowed = f"tp * pp * cp must divide the number of ranks ({num_ranks})"
        yield ConfigProblem(
            "actor.tp * actor.pp * actor.cp", f"{actor.tp} * {actor.pp} * {actor.cp} = {block}", allowed
        )
    if actor.sequence_parallel and actor.tp == 1:
        yield ConfigProblem("actor.sequence_parallel", True, "needs actor.tp > 1")
    if actor.cp > 1:
        allowed = "must be 1: micro-batches are not split over context parallel ranks"
        yield ConfigProblem("actor.cp", actor.cp, allowed)
    if device == "cpu" and actor.layer_spec == "transformer_engine":
        yield ConfigProblem("actor.layer_spec", actor.layer_spec, "must be 'auto' or 'local' on CPU")
    if device == "cpu" and actor.distributed_optimizer == "on":
        allowed = "must be 'auto' or 'off' on CPU (its checkpoints need apex or Transformer Engine)"
        yield ConfigProblem("actor.distributed_optimizer", "on", allowed)
    elif actor.distributed_optimizer == "on" and config.optimizer.name != "adam":
        yield ConfigProblem("actor.distributed_optimizer", "on", "works with optimizer.name = adam only")
    yield from _check_nodes(config, "actor.tp", actor.tp)


def _check_nodes(config: Config | SftConfig, path: str, tp: int) -> Problems:
    """Tensor parallelism exchanges activations in every layer: over the network it would stall the run."""
    per_node = config.cluster.ranks_per_node
    if config.cluster.nodes > 1 and (tp > per_node or per_node % tp):
        yield ConfigProblem(
            path, tp, f"must divide cluster.ranks_per_node ({per_node}): TP stays inside a node"
        )


def tp_problems(shape: ModelShape | None, path: str, tp: int) -> Problems:
    """Dimensions of the model that a tensor-parallel size does not divide."""
    if shape is None:
        return
    dimensions = {
        "query heads": shape.num_heads,
        "key/value heads": shape.num_kv_heads,
        "intermediate size": shape.intermediate_size,
    }  # not the vocabulary: actor and engine pad it
    bad = [f"{name} {size}" for name, size in dimensions.items() if size % tp]
    if bad:
        yield ConfigProblem(path, tp, f"must divide the model's {', '.join(bad)}")


def pp_problems(shape: ModelShape | None, path: str, pp: int) -> Problems:
    """A pipeline-parallel size that does not divide the model's layers."""
    if shape is not None and shape.num_layers % pp:
        yield ConfigProblem(path, pp, f"must divide the model's {shape.num_layers} layers")


def _check_architecture(config: Config | SftConfig, shape: ModelShape | None) -> Problems:
    """`model.architecture` is a promise about `model.path`: names what differs."""
    promised = config.model.architecture
    if promised is None or shape is None or shape is promised:
        return
    for name in type(promised).model_fields:
        there = getattr(shape, name, None)
        if there is not None and there != getattr(promised, name):
            allowed = f"contradicts {config.model.path}, which has {there!r}"
            yield ConfigProblem(f"model.architecture.{name}", getattr(promised, name), allowed)


def check_rollout(
    config: Config, shape: ModelShape | None, num_ranks: int, device: Device | None
) -> Problems:
    """The engine's layout, kernels and memory."""
    rollout = config.rollout
    if num_ranks % rollout.tp:
        yield ConfigProblem("rollout.tp", rollout.tp, f"must divide the number of ranks ({num_ranks})")
    yield from tp_problems(shape, "rollout.tp", rollout.tp)
    yield from _check_nodes(config, "rollout.tp", rollout.tp)
    if rollout.kernels == "native" and device == "cuda":
        yield ConfigProblem(
            "rollout.kernels", "native", "must be 'auto' or 'torch' on CUDA: native kernels are for CPU"
        )
    if rollout.max_running_requests > rollout.max_batched_tokens:
        most = rollout.max_batched_tokens
        allowed = f"must be <= rollout.max_batched_tokens ({most}): each request decodes one token"
        yield ConfigProblem("rollout.max_running_requests", rollout.max_running_requests, allowed)
    yield from check_speculation(rollout.speculation, has_drafter=config.idle.train_drafter)
    if shape is not None:
        yield from _check_kv_cache(config, shape)
        if rollout.top_k > shape.vocab_size:
            yield ConfigProblem(
                "rollout.top_k", rollout.top_k, f"must be <= the vocabulary ({shape.vocab_size})"
            )


def _check_kv_cache(config: Config, shape: ModelShape) -> Problems:
    """One request of full length must fit, or the engine could never finish it."""
    rollout = config.rollout
    if rollout.kv_cache_mib is None or shape.num_kv_heads % rollout.tp:
        return
    has_eagle = rollout.speculation.uses_eagle  # its pairs, and hidden states, lie in the same blocks
    layers = shape.num_layers + has_eagle
    width = 2 * layers * shape.num_kv_heads // rollout.tp * shape.head_dim + has_eagle * shape.hidden_size
    width *= 4 if rollout.dtype == "fp32" else 2
    blocks = -(-longest_request(config) // rollout.block_size)
    needed = -(-blocks * rollout.block_size * width // 2**20)
    if rollout.kv_cache_mib < needed:
        allowed = f"must be >= {needed} MiB, or the longest request does not fit"
        yield ConfigProblem("rollout.kv_cache_mib", rollout.kv_cache_mib, allowed)


def longest_request(config: Config) -> int:
    """Tokens of the longest prompt and answer together, training or evaluation."""
    answer = max(config.rollout.max_tokens, config.eval.max_tokens or 0)
    return config.data.max_prompt_tokens + answer


def check_idle(config: Config, shape: ModelShape | None, num_ranks: int, device: Device | None) -> Problems:
    """Training the drafter needs a trainable drafter, at least two replicas, and room for hidden states."""
    if config.idle.work_stealing and config.rollout.tp > 1:
        allowed = f"must be false with rollout.tp = {config.rollout.tp}: ranks of one engine cannot give requests away"
        yield ConfigProblem("idle.work_stealing", True, allowed)
    if not config.idle.train_drafter:
        return
    section, online = config.rollout.speculation, config.drafter.online
    if not section.uses_eagle:
        allowed = (
            f"needs rollout.speculation.drafter 'eagle' or 'hybrid': {section.drafter!r} has nothing to train"
        )
        yield ConfigProblem("idle.train_drafter", True, allowed)
    elif num_ranks // config.rollout.tp == 1 and section.drafter_path is None:
        allowed = (
            "is required with one rollout replica: it has no idle time, so random weights would stay random (or "
            "rollout.speculation.drafter=suffix or none, with idle.train_drafter=false)"
        )
        yield ConfigProblem("rollout.speculation.drafter_path", None, allowed)
    if online.fp8 in ("te", "torchao") and device == "cpu":
        allowed = "must be 'off' or 'emulate' on CPU"
        yield ConfigProblem("drafter.online.fp8", online.fp8, allowed)
    if shape is not None:
        size = shape.hidden_size * (4 if config.rollout.dtype == "fp32" else 2) + 8
        needed = min(config.drafter.window, online.micro_step_tokens) * size / 2**20
        if online.buffer_mib < needed:
            allowed = f"must be >= {needed:.2f}, or no long answer fits"
            yield ConfigProblem("drafter.online.buffer_mib", online.buffer_mib, allowed)


def check_batch(config: Config, num_ranks: int) -> Problems:
    """Prompts split evenly over engines and mini-batches, and every optimizer step has work for all ranks."""
    prompts = config.train.prompts_per_step
    replicas = num_ranks // config.rollout.tp
    mini_batches = config.algorithm.mini_batches
    if replicas and prompts % replicas:
        allowed = f"must be divisible by the {replicas} rollout replicas (ranks / rollout.tp)"
        yield ConfigProblem("train.prompts_per_step", prompts, allowed)
    if prompts % mini_batches:
        allowed = f"must be divisible by algorithm.mini_batches ({mini_batches})"
        yield ConfigProblem("train.prompts_per_step", prompts, allowed)
    actor = config.actor
    data_parallel = max(1, num_ranks // (actor.tp * actor.pp * actor.cp))
    answers = prompts * config.rollout.samples_per_prompt
    if answers < mini_batches * data_parallel:
        allowed = f"must be >= algorithm.mini_batches * data parallel size = {mini_batches} * {data_parallel}"
        yield ConfigProblem("train.prompts_per_step * rollout.samples_per_prompt", answers, allowed)


def check_stop(config: Config) -> Problems:
    """A signal must leave time for a checkpoint."""
    stop = config.stop
    for name, grace in (("stop.warning_s", stop.warning_s), ("stop.term_s", stop.term_s)):
        if grace <= stop.save_s:
            yield ConfigProblem(name, grace, f"must be above stop.save_s ({stop.save_s:g})")


def check_watchdog(config: Config) -> Problems:
    """A rank must be able to show life several times before its silence counts."""
    hang, beat = config.watchdog.hang_s, config.watchdog.heartbeat_s
    if hang and hang < 3 * beat:
        yield ConfigProblem(
            "watchdog.hang_s", hang, f"must be 0 or >= 3 * watchdog.heartbeat_s ({3 * beat:g})"
        )


def check_context(config: Config, max_positions: int | None) -> Problems:
    """Prompt + answer <= model.max_context <= what the model was made for."""
    limit, prompt = config.model.max_context, config.data.max_prompt_tokens
    for path, answer in (("rollout", config.rollout.max_tokens), ("eval", config.eval.max_tokens)):
        if answer is not None and prompt + answer > limit:
            value = f"{prompt} + {answer} = {prompt + answer}"
            yield ConfigProblem(
                f"data.max_prompt_tokens + {path}.max_tokens",
                value,
                f"must be <= model.max_context ({limit})",
            )
    yield from _check_positions(limit, max_positions)


def _check_positions(max_context: int, max_positions: int | None) -> Problems:
    if max_positions is not None and max_context > max_positions:
        yield ConfigProblem(
            "model.max_context", max_context, f"must be <= the model's {max_positions} positions"
        )
