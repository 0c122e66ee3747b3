"""Memory of one rank, planned before anything is allocated: `check` prints the plan, and setup allocates by it.

Not everything is there at once: activations belong to the update, the drafter's gradients to the idle window, the
bucket to the weight sync, a released KV cache to the rollout, offloaded optimizer state to the update. A rank needs
the memory of its fullest phase; a save takes nothing on the device, a resume as much as an update without activations.

On CUDA the KV cache takes the rest of the device beside everything else of the fullest phase in which it is there, at
most the need of all running requests at full length. So a device is never fuller than planned: weights
and optimizer are allocated first, the drafter's training state next, the engine with its cache last
(`trainer/models.py`). All sums are in bytes; the report shows GiB. Formulas: `policy.py`, `engine.py`, `drafter.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron_tlt.config.checks.layout import Device, resolve_device
from megatron_tlt.config.checks.pre_rollouts import why_no_eval_drafts, why_no_pre_rollouts
from megatron_tlt.config.dims import Dims
from megatron_tlt.config.model import ArchitectureConfig
from megatron_tlt.config.planning import drafter, engine, graphs, policy
from megatron_tlt.config.planning.activations import activation_bytes
from megatron_tlt.config.planning.parameters import (
    GIB,
    MIB,
    adapter_parameters,
    element_bytes,
    pinned_bytes,
    stage_parameters,
)
from megatron_tlt.config.root import Config, TrainingConfig

_INTERPRETER_BYTES = GIB // 2  # on CPU, with torch and megatron imported
# Of a GPU, memory that the caching allocator cannot use: rests of segments. A guess, to be measured on a GPU.
_FRAGMENT_SHARE = 0.02
_CARRIED_TOKEN_BYTES = 8  # id and log-prob; every rank holds all carried responses

Phase = Literal["rollout", "idle window", "update", "merge", "weight_sync"]
PHASES: tuple[Phase, ...] = ("rollout", "idle window", "update", "merge", "weight_sync")
KV = "KV cache"
RESERVE = "cluster.reserve_gib"


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of every rank of one pipeline stage, by purpose, and in which phases they are there (others: in all)."""

    stage: int
    parts: dict[str, int] = field(default_factory=dict)
    only: dict[str, tuple[Phase, ...]] = field(default_factory=dict)
    phases: tuple[Phase, ...] = PHASES
    host: dict[str, int] = field(default_factory=dict)
    """In the host's memory, on CUDA; on CPU it is among `parts`."""

    def of_phase(self, phase: Phase) -> int:
        """Bytes that are there in one phase."""
        return sum(size for name, size in self.parts.items() if phase in self.only.get(name, PHASES))

    @property
    def total(self) -> int:
        """Bytes of the fullest phase."""
        return max(self.of_phase(phase) for phase in self.phases)

    @property
    def fullest(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=self.of_phase)


def estimate_memory(
    config: TrainingConfig,
    shape: ArchitectureConfig,
    num_ranks: int,
    device: Device | None = None,
    limit_gib: float | None = None,
) -> list[RankMemory]:
    """One entry a pipeline stage (all its ranks need the same). `tp * pp * cp` must divide `num_ranks`.

    `limit_gib`: memory of the device; default `cluster.memory_gib`. The KV cache is the same on all stages.
    """
    device = resolve_device(config, device) or "cpu"
    limit = limit_gib if limit_gib is not None else config.cluster.memory_gib
    actor = config.actor
    dims = Dims.fit(num_ranks, tp=actor.tp, pp=actor.pp, cp=actor.cp, ep=actor.ep)
    stages = [_stage(config, shape, dims, stage, device) for stage in range(dims.pp)]
    if (rl := config.rl) is None:
        return stages
    if device == "cuda" and limit is not None:
        for stage in stages:
            stage.parts["fragments"] = int(_FRAGMENT_SHARE * limit * GIB)
    cache = _kv_cache(rl, shape, stages, device, limit)
    for stage in stages:
        stage.parts[KV] = cache
    return stages


def _policy_parts(
    config: TrainingConfig, shape: ArchitectureConfig, dims: Dims, stage: int, device: Device
) -> dict[str, int]:
    """The parts of every run, and memory that is not allocated through PyTorch."""
    count, experts = stage_parameters(shape, dims, stage)
    element, lora = element_bytes(config.actor.dtype), config.actor.lora
    trained = (count, experts) if lora is None else adapter_parameters(shape, lora, dims, stage)
    runtime = {"runtime": _INTERPRETER_BYTES} if device == "cpu" else {RESERVE: int(config.cluster.reserve_gib * GIB)}
    return {
        **runtime,
        "weights": count * element,
        **({"experts": experts * element} if shape.num_experts else {}),
        **({"adapters": sum(trained) * element} if lora is not None else {}),
        "gradients": sum(trained) * 4,
        "optimizer": policy.optimizer_bytes(config, *trained, dims, device),
        "rotations": policy.rotation_bytes(config, shape, dims, device),
        "dummy gradients": policy.dummy_gradient_bytes(config, shape, dims, stage, device),
        "activations": activation_bytes(config, shape, dims, stage, device),
    }


def _stage(config: TrainingConfig, shape: ArchitectureConfig, dims: Dims, stage: int, device: Device) -> RankMemory:
    """All parts; of the KV cache only its place among them."""
    parts = _policy_parts(config, shape, dims, stage, device)
    weights = parts["weights"] + parts.get("experts", 0)
    state = {
        "optimizer": pinned_bytes(parts["optimizer"]) * config.actor.offload_optimizer,
        "checkpoint": parts["optimizer"] + parts.get("adapters", weights) // (dims.dp * dims.cp),
    }
    if (rl := config.rl) is None:
        host = state if device == "cuda" else {}
        return RankMemory(stage, parts, {"activations": ("update",)}, ("update",), host=host)
    frozen = rl.frozen_shape(shape)
    held = 0 if frozen is None else sum(stage_parameters(frozen, dims, stage)) * element_bytes(rl.actor.dtype)
    parts |= {
        "reference" if rl.algorithm.teacher is None else "teacher": held,
        "engine weights": engine.engine_bytes(rl, shape, device),
        "rollout step": engine.rollout_step_bytes(rl, shape, device),
        engine.READ: engine.read_bytes(rl, shape, device),
        "graphs": graphs.graph_bytes(rl, device),
        KV: 0,
        "drafter": engine.drafter_weight_bytes(rl, shape, device),
        **drafter.training_parts(rl, shape, device),
        "weight sync bucket": policy.weight_sync_bytes(rl, shape, dims),
    }
    if (process := rl.rollout.engine_process) is not None:
        own = engine.PROCESS_MIB * MIB // (1 if device == "cuda" else 4)
        parts |= {"engine's process": own, **engine.process_bytes(rl, process, shape)}
    host = {**drafter.host_parts(rl, shape, device), "suffix drafter": engine.suffix_bytes(rl)}
    only = _only(rl, device)
    if why_no_pre_rollouts(rl, dims.world_size) is None:
        each = _draft_bytes(rl, 2 * rl.train.prompts_per_step * rl.rollout.samples_per_prompt, rl.rollout.max_tokens)
        host["pre-rollouts"] = 2 * each + each  # of two windows; what an exchange brings comes on top
        only |= {part: (*only[part], "idle window") for part in (KV, "rollout step") if part in only}
    if rl.rollout.carry_over is not None:
        # As many as a step generates, at full length. More may be carried, but those that wait are shorter.
        responses = rl.train.prompts_per_step * rl.rollout.samples_per_prompt
        host["carried responses"] = _CARRIED_TOKEN_BYTES * responses * rl.rollout.max_tokens
    if why_no_eval_drafts(rl) is None:
        tokens = rl.eval.max_tokens or rl.rollout.max_tokens
        each = _draft_bytes(rl, rl.eval.num_prompts * rl.eval.samples_per_prompt, tokens)
        host["drafts of evaluations"] = 2 * each  # as above
    if device == "cpu":
        return RankMemory(stage, parts | host, only)
    return RankMemory(stage, parts, only, host=state | host)


def _draft_bytes(config: Config, responses: int, tokens: int) -> int:
    """The most that one exchange of drafts keeps: of so many responses, each of at most `tokens` tokens."""
    return min(4 * responses * tokens, int(config.idle.pre_rollout_mib * MIB))


def _only(config: Config, device: Device) -> dict[str, tuple[Phase, ...]]:
    """Parts that are there in some phases only."""
    only: dict[str, tuple[Phase, ...]] = {
        "activations": ("update",),
        "actor's hidden states": ("update",),
        "rollout step": ("rollout",),
        engine.READ: ("rollout",),
        "drafter step": ("idle window",),
        "drafter's LM head": ("idle window", "update", "merge"),  # from a window's first micro-step to its merge
        "drafter merge": ("merge",),
        "drafter weight sync": ("weight_sync",),
        "weight sync bucket": ("weight_sync",),
        engine.LOADED: ("weight_sync",),
    }
    if config.rollout.releases_cache(device):
        only[KV] = ("rollout",)
    if config.rollout.engine_sleeps(device):
        only |= dict.fromkeys(("engine weights", "drafter"), ("rollout", "idle window", "weight_sync"))
        only[engine.hidden_part(config)] = ("rollout",)
    if config.actor.offload_optimizer:
        only["gradients"] = ("update",)
        if device == "cuda":  # on CPU the host is where it lies anyway
            only["optimizer"] = ("update",)
    return only


def _kv_cache(
    config: Config,
    shape: ArchitectureConfig,
    stages: list[RankMemory],
    device: Device,
    limit_gib: float | None,
) -> int:
    """The configured cache; by default what all running requests need at full length, on CUDA at most what remains.

    Never less than one request needs: where that does not remain, the plan exceeds its limit and is refused.
    TensorRT-LLM takes its share of what is free at the start of its engine, which is built last; without a limit
    nothing is known of it.
    """
    if (share := config.rollout.cache_share) is not None:
        held = max(sum(size for n, size in s.parts.items() if n not in s.only) for s in stages)
        free = max(0, int((limit_gib or 0) * GIB) - held)
        return int(share * free)
    if config.rollout.kv_cache_mib is not None:
        return config.rollout.kv_cache_mib * MIB
    most = engine.most_cache_bytes(config, shape)
    if device == "cpu":
        return most
    least = engine.least_cache_bytes(config, shape)
    if limit_gib is None:
        return least
    there = stages[0].only.get(KV, PHASES)
    taken = max(stage.of_phase(phase) for stage in stages for phase in there)
    return min(most, max(least, int(limit_gib * GIB) - taken))


def beside_cache(config: Config, stages: list[RankMemory]) -> int:
    """Bytes that PyTorch has allocated on a GPU in the fullest phase in which the KV cache is there, beside it."""
    there = stages[0].only.get(KV, PHASES)
    return max(s.of_phase(phase) - s.parts[KV] - s.parts[RESERVE] for s in stages for phase in there)


def node_host_bytes(stages: list[RankMemory], ranks_per_node: int) -> int:
    """The host's memory of a node whose ranks are all of the stage that needs most there, the first rank included."""
    each = max(sum(size for name, size in stage.host.items() if name != drafter.SAVE_COPY) for stage in stages)
    return each * ranks_per_node + max(stage.host.get(drafter.SAVE_COPY, 0) for stage in stages)
