"""Cross-checks of the layout: ranks, parallel dimensions, nodes, the shape of the model."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import Literal

from megatron_tlt.config.actor import LORA_TARGETS, MLP_TARGETS, ActorSection
from megatron_tlt.config.dims import Dims
from megatron_tlt.config.model import ArchitectureConfig
from megatron_tlt.config.planning.parameters import element_bytes
from megatron_tlt.config.root import Config, TrainingConfig
from megatron_tlt.errors import ConfigError, ConfigProblem, Problems

Device = Literal["cpu", "cuda"]


def resolve_device(config: TrainingConfig, device: Device | None) -> Device | None:
    """The device to check for: the caller's, else the configured one; None where that is auto."""
    configured = config.distributed.device
    return device if device is not None or configured == "auto" else configured


def check_grid(config: TrainingConfig, num_ranks: int) -> Problems:
    """Whether the ranks fill a grid of tp * pp * cp * dp."""
    actor = config.actor
    try:
        Dims.fit(num_ranks, actor.tp, actor.pp, actor.cp, actor.ep)
    except ConfigError as error:
        yield from error.problems


def check_world(config: TrainingConfig, num_ranks: int, device: Device | None) -> Problems:
    """Ranks = tp * pp * cp * dp, and the needs of each dimension."""
    yield from check_grid(config, num_ranks)
    actor = config.actor
    if actor.sequence_parallel and actor.tp == 1:
        yield ConfigProblem("actor.sequence_parallel", True, "needs actor.tp > 1")
    if device == "cpu" and actor.layer_spec == "transformer_engine":
        yield ConfigProblem("actor.layer_spec", actor.layer_spec, "must be 'auto' or 'local' on CPU")
    elif device == "cpu" or actor.layer_spec == "local":
        yield from local_recompute(actor)
    if device == "cpu" and actor.distributed_optimizer == "on":
        allowed = "must be 'auto' or 'off' on CPU (its checkpoints need apex or Transformer Engine)"
        yield ConfigProblem("actor.distributed_optimizer", "on", allowed)
    elif actor.distributed_optimizer == "on" and config.optimizer.name != "adam":
        yield ConfigProblem("actor.distributed_optimizer", "on", "works with optimizer.name = adam only")
    yield from check_nodes(config, "actor.tp", actor.tp)


def local_recompute(actor: ActorSection) -> Problems:
    """Selective recompute of nothing but norms, which only Transformer Engine's layers compute again."""
    if actor.recompute == "selective" and set(actor.recompute_modules) == {"layernorm"}:
        allowed = "must have 'mlp_act' or 'mlp' with megatron's local layers, which keep their norms"
        yield ConfigProblem("actor.recompute_modules", actor.recompute_modules, allowed)


_ENGINE_OF_CP = "1.10"  # Transformer Engine from which on its p2p attention takes packed sequences


def check_attention(config: TrainingConfig, device: Device | None, engine: str | None = None) -> Problems:
    """A type that no attention of packed sequences takes, or an installed Transformer Engine without their context
    parallelism.

    `engine`: version of the latter; default: the installed one, if any.
    """
    actor = config.actor
    is_fused = actor.cp > 1 or actor.layer_spec == "transformer_engine"  # local layers would make masks with cp
    if device == "cuda" and actor.dtype == "fp32" and is_fused:
        allowed = "must be bf16 on CUDA with Transformer Engine's layers or actor.cp above 1: its attention has no fp32"
        yield ConfigProblem("actor.dtype", "fp32", allowed)
    if actor.cp == 1:
        return
    local = device == "cpu" or actor.layer_spec == "local"
    engine = engine if engine is not None or local else _installed_engine()
    if engine is not None and _major_minor(engine) < _major_minor(_ENGINE_OF_CP):
        allowed = f"needs Transformer Engine {_ENGINE_OF_CP} for packed sequences; {engine} is installed"
        yield ConfigProblem("actor.cp", actor.cp, allowed)


def _major_minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def _installed_engine() -> str | None:
    try:
        return importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        return None


GROUPED = "PyTorch's grouped products take rows of whole 16 bytes"


def grouped_step(element: int) -> int:
    """Elements of `element` bytes that a row of a grouped product (`grouped_mm`) has a multiple of, on CPUs, too: a row
    of an expert's inputs, of its weights or of their adapters.
    """
    return 16 // element


def check_experts(config: TrainingConfig, shape: ArchitectureConfig | None) -> Problems:
    """What a mixture of experts needs of megatron and of products. Experts are never cut by tensor parallel."""
    actor = config.actor
    if shape is None:
        return
    if not shape.num_experts:
        wanted = {"ep": actor.ep > 1, "load_balancing_loss": actor.load_balancing_loss > 0}
        wanted |= {"router_z_loss": actor.router_z_loss > 0, "router_replay": actor.router_replay != "off"}
        for name in (name for name, is_set in wanted.items() if is_set):
            yield ConfigProblem(f"actor.{name}", getattr(actor, name), "needs a mixture of experts, this is dense")
        return
    losses = {name: getattr(actor, name) for name in ("load_balancing_loss", "router_z_loss")}
    for name in (name for name, weight in losses.items() if weight and actor.lora is not None):
        yield ConfigProblem(f"actor.{name}", losses[name], "must be 0 with actor.lora: routers are not trained")
    if shape.num_experts % actor.ep:
        yield ConfigProblem("actor.ep", actor.ep, f"must divide the model's {shape.num_experts} experts")
    if actor.tp > 1 and not actor.sequence_parallel:
        allowed = "must be true for a mixture of experts with actor.tp > 1: megatron's layers refuse it otherwise"
        yield ConfigProblem("actor.sequence_parallel", False, allowed)
    if config.rl is None or config.rl.trains:
        yield from _check_grouped(config, shape)


def ungrouped_sizes(shape: ArchitectureConfig, dtype: str, tp: int = 1) -> list[tuple[str, int, int]]:
    """Sizes of experts that grouped products in `dtype` refuse, each expert cut over `tp` ranks: name, size, and what
    the part of a rank must be a multiple of.
    """
    step = grouped_step(element_bytes(dtype))
    sizes = [("hidden size", shape.hidden_size, 1), ("experts' width", shape.moe_intermediate_size, tp)]
    return [(name, size, step) for name, size, cut in sizes if size // cut % step]


def _check_grouped(config: TrainingConfig, shape: ArchitectureConfig) -> Problems:
    """Sizes of experts that the actor's grouped products refuse."""
    for name, size, step in ungrouped_sizes(shape, config.actor.dtype):
        allowed = f"needs the model's {name} ({size}) to be a multiple of {step}: {GROUPED}"
        yield ConfigProblem("actor.dtype", config.actor.dtype, allowed)


def check_first_stage(config: TrainingConfig, shape: ArchitectureConfig | None) -> Problems:
    """megatron's optimizer has a part for experts and one for other weights, and saves Adam's step of each from the
    first rank: its pipeline stage must train weights of both.
    """
    if shape is None or not shape.num_experts or config.optimizer.name != "adam":
        return
    trained, of_mlp = set(config.actor.lora.targets if config.actor.lora else LORA_TARGETS), set(MLP_TARGETS)
    parts = {"with experts": shape.moe_layers if trained & of_mlp else ()}
    if trained <= of_mlp and not shape.shared_expert_intermediate_size:
        parts["without experts"] = shape.dense_layers
    for kind, layers in parts.items():
        if layers and min(layers) >= shape.num_layers // config.actor.pp:
            allowed = f"must leave the first stage a layer {kind}, from which Adam's step of such layers is saved"
            yield ConfigProblem("actor.pp", config.actor.pp, allowed)


def check_nodes(config: TrainingConfig, path: str, tp: int) -> Problems:
    """Tensor parallelism exchanges activations in every layer: over the network it would stall the run."""
    cluster = config.cluster
    yield from node_problems(cluster.nodes, "cluster.ranks_per_node", cluster.ranks_per_node, path, tp)


def node_problems(nodes: int, field: str, per_node: int, path: str, tp: int) -> Problems:
    """A tensor-parallel size that does not divide the ranks of one of several nodes, which `field` gives."""
    if nodes > 1 and per_node % tp:
        yield ConfigProblem(path, tp, f"must divide {field} ({per_node}): TP stays inside a node")


def check_hosts(config: TrainingConfig, hosts: Sequence[str]) -> Problems:
    """As `check_nodes`, of the ranks there are, with their `hosts`: groups are of consecutive ranks, which a cyclic
    placement splits.
    """
    sizes = {"actor.tp": config.actor.tp, **({} if config.rl is None else {"rollout.tp": config.rl.rollout.tp})}
    for path, tp in sizes.items():
        groups = [hosts[first : first + tp] for first in range(0, len(hosts), tp)]
        split = next((group for group, of in enumerate(groups) if len(set(of)) > 1), None)
        if split is not None:
            there = ", ".join(dict.fromkeys(groups[split]))
            allowed = f"must keep TP inside a node: ranks {split * tp} to {split * tp + len(groups[split]) - 1} are on "
            yield ConfigProblem(path, tp, f"{allowed}{there} (place consecutive ranks on one node, in blocks of {tp})")


def tp_problems(shape: ArchitectureConfig | None, path: str, tp: int) -> Problems:
    """Dimensions of the model that a tensor-parallel size does not divide."""
    if shape is None:
        return
    dimensions = {
        "query heads": shape.num_heads,
        "key/value heads": shape.num_kv_heads,
        "intermediate size": shape.intermediate_size if len(shape.moe_layers) < shape.num_layers else 0,
        "shared expert's width": shape.shared_expert_intermediate_size,
    }  # not the vocabulary: actor and engine pad it
    if path == "rollout.tp":  # the actor's experts are whole
        dimensions["experts' width"] = shape.moe_intermediate_size
    bad = [f"{name} {size}" for name, size in dimensions.items() if size % tp]
    if bad:
        yield ConfigProblem(path, tp, f"must divide the model's {', '.join(bad)}")


def pp_problems(shape: ArchitectureConfig | None, path: str, pp: int) -> Problems:
    """A pipeline-parallel size that does not divide the model's layers."""
    if shape is not None and shape.num_layers % pp:
        yield ConfigProblem(path, pp, f"must divide the model's {shape.num_layers} layers")


def check_architecture(config: TrainingConfig, shape: ArchitectureConfig | None) -> Problems:
    """Fields of `model.architecture` that contradict `model.path`."""
    promised, path = config.model.architecture, config.model.path
    if promised is None or shape is None:
        return
    for name, value in promised:
        there = getattr(shape, name)
        is_same = promised.moe_layers == shape.moe_layers if name == "dense_layers" else there == value
        if not is_same:
            yield ConfigProblem(f"model.architecture.{name}", value, f"contradicts {path}, which has {there!r}")


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
    responses = prompts * config.rollout.samples_per_prompt
    if responses < mini_batches * data_parallel:
        allowed = f"must be >= algorithm.mini_batches * data parallel size = {mini_batches} * {data_parallel}"
        yield ConfigProblem("train.prompts_per_step * rollout.samples_per_prompt", responses, allowed)
