"""Memory of one rank, estimated before anything is allocated.

Legend: P parameters on this rank, T rows of a forward, H hidden, F intermediate, V vocabulary, d head width, K
key-value heads, L layers, t = tp; e bytes of an element (fp32 4, bf16 2). All sums are in bytes; the report shows GiB.

Not everything is there at once: activations belong to the update, the bucket to the push, a released KV cache to the
rollout, offloaded optimizer state to the update. A rank needs what its fullest phase needs.

* Weights, gradients, optimizer (Adam): `4P + 4P + 8P` in fp32; in bf16 `2P + 4P + 12P` (gradients are reduced
  in fp32; the optimizer holds an fp32 master copy and two moments). The distributed optimizer divides the
  last term by the data parallel size: the `6 + 12/d` bytes a parameter of megatron-core's distributed
  optimizer documentation, stage 1 of Rajbhandari et al., arXiv 1910.02054, section 5.
* Activations, the LM head and what backward takes: `activations.py`.
* Engine: the embedding whole on every rank, layers over t; in C a packed LM head, whole on every rank; in PyTorch the
  head over t, and a head of its own where it is sharded (t > 1), even if the model ties it.
* KV cache: `2*L*(K/t)*d*e` bytes a token of context (Kwon et al., arXiv 2309.06180, section 2.3); a trained drafter
  adds its one layer with all K heads, and `H*e` for the policy's hidden states, which it reads; every rank holds both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron_tlt.config.checks.layout import Device, resolve_device
from megatron_tlt.config.checks.rollout import longest_request
from megatron_tlt.config.dims import Dims
from megatron_tlt.config.planning.activations import Slice, update_bytes
from megatron_tlt.config.root import Config, SftConfig
from megatron_tlt.errors import ConfigProblem
from megatron_tlt.interfaces import ModelShape

GIB = 2**30
MIB = 2**20

# CUDA context, NCCL channels and cuBLAS workspaces; an interpreter with torch and megatron imported.
RUNTIME_BYTES: dict[Device, int] = {"cuda": 2 * GIB, "cpu": GIB // 2}


_VERIFY_ROWS = 512  # of `rollout.graph_pool.PoolSizes`

Phase = Literal["rollout", "update", "push"]
PHASES: tuple[Phase, ...] = ("rollout", "update", "push")


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of every rank of one pipeline stage, by purpose, and which of it is there in one phase only."""

    stage: int
    parts: dict[str, int] = field(default_factory=dict)
    only: dict[str, Phase] = field(default_factory=dict)
    phases: tuple[Phase, ...] = PHASES

    def of_phase(self, phase: Phase) -> int:
        """Bytes that are there in one phase."""
        return sum(size for name, size in self.parts.items() if self.only.get(name, phase) == phase)

    @property
    def total(self) -> int:
        """Bytes of the fullest phase."""
        return max(self.of_phase(phase) for phase in self.phases)


def element_bytes(dtype: str) -> int:
    """Bytes of one element of "fp32" or "bf16"."""
    return {"fp32": 4, "bf16": 2}[dtype]


def layer_parameters(shape: ModelShape) -> int:
    """Parameters of one decoder layer; biases and head norms (well under 1 %) are left out."""
    attention = shape.hidden_size * shape.head_dim * 2 * (shape.num_heads + shape.num_kv_heads)
    return attention + 3 * shape.hidden_size * shape.intermediate_size + 2 * shape.hidden_size


def total_parameters(shape: ModelShape) -> int:
    """Parameters of the whole model."""
    embeddings = shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2)
    return shape.num_layers * layer_parameters(shape) + embeddings + shape.hidden_size


def stage_parameters(shape: ModelShape, dims: Dims, stage: int) -> int:
    """P: parameters of one rank of a pipeline stage. A tied head on another stage is a second copy."""
    count = shape.num_layers * layer_parameters(shape) // dims.pp
    embedding = shape.vocab_size * shape.hidden_size
    first, last = stage == 0, stage == dims.pp - 1
    count += embedding * first
    count += embedding * (last and not (shape.tie_word_embeddings and first))
    return count // dims.tp


def optimizer_bytes(config: Config | SftConfig, parameters: int, dims: Dims, device: Device) -> int:
    """Master weights and moments of one rank."""
    master = 4 if config.actor.dtype == "bf16" else 0
    moments = 8 if config.optimizer.name == "adam" else 0
    choice = config.actor.distributed_optimizer
    sharded = choice == "on" or (choice == "auto" and device == "cuda")
    return parameters * (master + moments) // (dims.dp * dims.cp if sharded else 1)


def micro_batch_tokens(config: Config | SftConfig) -> int:
    """T: the packing budget, or one longest sequence when that is more, split over context parallel ranks."""
    longest = longest_request(config) if isinstance(config, Config) else config.model.max_context
    return -(-max(config.actor.micro_batch_tokens, longest) // config.actor.cp)


def activation_bytes(
    config: Config | SftConfig, shape: ModelShape, dims: Dims, stage: int, device: Device = "cpu"
) -> int:
    """What an update takes on one rank of a stage beside its state; see `activations.py`."""
    actor = config.actor
    at = Slice(
        tokens=micro_batch_tokens(config),
        element=element_bytes(actor.dtype),
        tp=dims.tp,
        sequence=dims.tp if actor.sequence_parallel else 1,
        layers=shape.num_layers / dims.pp,
        in_flight=dims.pp - stage,
        is_last=stage == dims.pp - 1,
        device=device,
    )
    return update_bytes(shape, at, actor.recompute)


def kv_bytes_per_token(config: Config, shape: ModelShape) -> int:
    """KV cache of one token of context on one rank of an engine; with a trained drafter its own, and what it reads."""
    heads, trained = -(-shape.num_kv_heads // config.rollout.tp), config.rollout.speculation.uses_eagle
    keys_values = 2 * (shape.num_layers * heads + trained * shape.num_kv_heads) * shape.head_dim
    return (keys_values + shape.hidden_size * trained) * element_bytes(config.rollout.dtype)


def speculation_bytes(config: Config, shape: ModelShape) -> int:
    """What drafters hold on one rank beside their part of the KV cache.

    The eagle drafter: one layer and `fc` (2H x H), whole on every rank. The suffix drafter: its tries and as much for
    earlier answers, once both are full.
    """
    rollout, section = config.rollout, config.rollout.speculation
    total = 2 * section.suffix.history_mib * MIB * section.uses_suffix
    if section.uses_eagle:
        hidden = shape.hidden_size
        weights = layer_parameters(shape) + 2 * hidden * hidden
        total += weights * element_bytes(rollout.dtype)
    return total


def drafter_training_bytes(config: Config, shape: ModelShape) -> int:
    """What training the drafter in idle time takes on one rank, all in fp32 and never sharded.

    Weights, their mean, gradients and two moments; the state where the window began, the buffer of a merge and the copy
    that a checkpoint is written from, four times the weights each; kept hidden states; embedding and LM head of every
    policy version that they may be of.
    """
    if not config.idle.train_drafter:
        return 0
    online, hidden = config.drafter.online, shape.hidden_size
    weights = layer_parameters(shape) + 2 * hidden * hidden
    versions = online.max_age + 3  # the last push's, too, and the copy that it is made from
    tables = versions * shape.vocab_size * hidden * (1 if shape.tie_word_embeddings else 2)
    return 4 * (17 * weights + tables) + int(online.buffer_mib * MIB)


def kv_cache_bytes(config: Config, shape: ModelShape, device: Device) -> int:
    """The configured cache; by default what all running requests need at full length (CPU), or one (CUDA).

    On CUDA the engine takes what is free, so one request at full length is the least it must find.
    """
    if config.rollout.kv_cache_mib is not None:
        return config.rollout.kv_cache_mib * MIB
    requests = 1 if device == "cuda" else config.rollout.max_running_requests
    blocks = requests * -(-config.model.max_context // config.rollout.block_size) + 1
    return blocks * config.rollout.block_size * kv_bytes_per_token(config, shape)


def engine_bytes(config: Config, shape: ModelShape, device: Device) -> int:
    """Weights of one rank of an engine. The native decoder (packed weights) holds the whole LM head on every rank."""
    rollout = config.rollout
    table = shape.vocab_size * shape.hidden_size
    packed = device == "cpu" and rollout.kernels != "torch"
    has_head = packed or rollout.tp > 1 or not shape.tie_word_embeddings
    count = shape.num_layers * layer_parameters(shape) // rollout.tp
    count += table + has_head * table // (1 if packed else rollout.tp)
    return count * element_bytes(rollout.dtype)


def rollout_step_bytes(config: Config, shape: ModelShape) -> int:
    """Temporaries of the largest forward, or of drawing a token for each request, whichever is more.

    Of each of T = max_batched_tokens rows the residual stream, its norm and their sum, and the MLP's four products; of
    a drawn row its logits, noise and ranks, eight times V in fp32.
    """
    rollout = config.rollout
    row = 3 * shape.hidden_size + 4 * shape.intermediate_size // rollout.tp
    forward = rollout.max_batched_tokens * row * element_bytes(rollout.dtype)
    return max(forward, rollout.max_running_requests * shape.vocab_size * 8 * 4)


def graph_bytes(config: Config, shape: ModelShape, device: Device) -> int:
    """Output buffers of captured graphs (`rollout.graph_pool`), where there are any; not the graphs themselves."""
    rollout = config.rollout
    if device != "cuda" or not rollout.cuda_graphs or rollout.tp > 1 or rollout.numerics != "default":
        return 0
    rows = max(rollout.max_running_requests, _VERIFY_ROWS)
    return rows * (4 * shape.vocab_size + element_bytes(rollout.dtype) * shape.hidden_size)


def estimate_memory(
    config: Config | SftConfig, shape: ModelShape, num_ranks: int, device: Device | None = None
) -> list[RankMemory]:
    """One entry a pipeline stage (all its ranks need the same). `tp * pp * cp` must divide `num_ranks`."""
    device = resolve_device(config, device) or "cpu"
    actor = config.actor
    dims = Dims.fit(num_ranks, tp=actor.tp, pp=actor.pp, cp=actor.cp)
    stages = []
    for stage in range(dims.pp):
        count = stage_parameters(shape, dims, stage)
        parts = {
            "weights": count * element_bytes(actor.dtype),
            "gradients": count * 4,
            "optimizer": optimizer_bytes(config, count, dims, device),
            "activations": activation_bytes(config, shape, dims, stage, device),
        }
        if not isinstance(config, Config):
            parts["runtime"] = RUNTIME_BYTES[device]
            stages.append(RankMemory(stage, parts, {"activations": "update"}, ("update",)))
            continue
        parts |= _rollout_parts(config, shape, count, device) | {"runtime": RUNTIME_BYTES[device]}
        stages.append(RankMemory(stage, parts, _only(config, device)))
    return stages


def _only(config: Config, device: Device) -> dict[str, Phase]:
    """Parts that are there in one phase only."""
    only: dict[str, Phase] = {"activations": "update", "rollout step": "rollout", "push bucket": "push"}
    if config.rollout.release_cache:
        only |= {"KV cache": "rollout", "graph buffers": "rollout"}
    if config.actor.offload_optimizer:
        only["gradients"] = "update"
        if device == "cuda":  # on CPU the host is where it lies anyway
            only["optimizer"] = "update"
    return only


def _rollout_parts(config: Config, shape: ModelShape, count: int, device: Device) -> dict[str, int]:
    reference = count * element_bytes(config.actor.dtype) if config.algorithm.kl_coef > 0 else 0
    return {
        "reference": reference,
        "engine weights": engine_bytes(config, shape, device),
        "rollout step": rollout_step_bytes(config, shape),
        "graph buffers": graph_bytes(config, shape, device),
        "KV cache": kv_cache_bytes(config, shape, device),
        "drafters": speculation_bytes(config, shape),
        "drafter training": drafter_training_bytes(config, shape),
        "push bucket": config.sync.bucket_mib * MIB,
    }


def check_memory(
    config: Config | SftConfig, shape: ModelShape, num_ranks: int, device: Device | None = None
) -> list[ConfigProblem]:
    """A problem for the fullest stage, if `cluster.memory_gib` is set and a rank needs more."""
    limit = config.cluster.memory_gib
    if limit is None:
        return []
    worst = max(estimate_memory(config, shape, num_ranks, device), key=lambda stage: stage.total)
    if worst.total <= limit * GIB:
        return []
    largest = sorted(worst.parts.items(), key=lambda part: -part[1])[:3]
    shares = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
    fullest = max(worst.phases, key=worst.of_phase)
    needs = f"needs {worst.total / GIB:.1f} GiB in the {fullest}"
    allowed = f"a rank of pipeline stage {worst.stage} {needs} ({shares}, ...)"
    return [ConfigProblem("cluster.memory_gib", limit, allowed)]
