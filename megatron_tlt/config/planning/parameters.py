"""Parameters of a model, of a layer, of a pipeline stage's rank, and of the drafter; bytes of their elements."""

from __future__ import annotations

from megatron_tlt.config.actor import MLP_TARGETS, LoraSection
from megatron_tlt.config.dims import Dims
from megatron_tlt.config.model import ArchitectureConfig
from megatron_tlt.config.root import Config

GIB = 2**30
MIB = 2**20


def element_bytes(dtype: str) -> int:
    """Bytes of one element of "fp32" or "bf16"."""
    return {"fp32": 4, "bf16": 2}[dtype]


def pinned_bytes(size: int) -> int:
    """The most that tensors of `size` bytes take in pinned memory: PyTorch rounds each up to a power of two."""
    return 2 * size


def layer_parameters(shape: ArchitectureConfig) -> int:
    """Parameters of one dense decoder layer; biases and head norms (well under 1 %) are left out."""
    return _attention_parameters(shape) + 3 * shape.hidden_size * shape.intermediate_size


def _attention_parameters(shape: ArchitectureConfig) -> int:
    """Of a layer, all but its MLP or experts."""
    attention = shape.hidden_size * shape.head_dim * 2 * (shape.num_heads + shape.num_kv_heads)
    return attention + 2 * shape.hidden_size


def _unrouted_parameters(shape: ArchitectureConfig) -> int:
    """Of a layer with experts, all but the experts that the router chooses from."""
    router = shape.hidden_size * (shape.num_experts + 3 * shape.shared_expert_intermediate_size)
    return _attention_parameters(shape) + router


def expert_parameters(shape: ArchitectureConfig, experts: float) -> int:
    """Parameters of so many experts of one layer."""
    return int(3 * experts * shape.hidden_size * shape.moe_intermediate_size)


def decoder_parameters(shape: ArchitectureConfig, experts: float | None = None) -> int:
    """Parameters of all layers. `experts`: count so many of each layer with experts; default: all."""
    routed = shape.num_experts if experts is None else experts
    sparse = _unrouted_parameters(shape) + expert_parameters(shape, routed)
    dense = shape.num_layers - len(shape.moe_layers)
    return dense * layer_parameters(shape) + len(shape.moe_layers) * sparse


def total_parameters(shape: ArchitectureConfig) -> int:
    """Parameters of the whole model."""
    embeddings = shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2)
    return decoder_parameters(shape) + embeddings + shape.hidden_size


def active_parameters(shape: ArchitectureConfig) -> int:
    """Parameters that one token passes: of experts those that it takes. All of a dense model's."""
    unused = decoder_parameters(shape) - decoder_parameters(shape, shape.num_experts_per_tok)
    return total_parameters(shape) - unused


def stage_parameters(shape: ArchitectureConfig, dims: Dims, stage: int) -> tuple[int, int]:
    """P: parameters of one rank of a pipeline stage, without its experts, and of its experts.

    A tied head on another stage is a second copy. TP does not cut experts, EP does.
    """
    per_stage = shape.num_layers // dims.pp
    sparse = [layer for layer in shape.moe_layers if layer // per_stage == stage]
    experts = len(sparse) * expert_parameters(shape, shape.num_experts)
    count = (per_stage - len(sparse)) * layer_parameters(shape) + len(sparse) * _unrouted_parameters(shape)
    embedding = shape.vocab_size * shape.hidden_size
    first, last = stage == 0, stage == dims.pp - 1
    count += embedding * first
    count += embedding * (last and not (shape.tie_word_embeddings and first))
    return count // dims.tp, experts // dims.ep


def adapter_parameters(shape: ArchitectureConfig, lora: LoraSection, dims: Dims, stage: int) -> tuple[int, int]:
    """Parameters of the adapters on one rank of a pipeline stage, without its experts', and of its experts'.

    TP cuts one factor of a pair; both of an expert's are whole.
    """
    hidden, per_stage = shape.hidden_size, shape.num_layers // dims.pp
    heads, groups = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = {"q_proj": heads, "k_proj": groups, "v_proj": groups, "o_proj": heads}

    def pairs(widths: dict[str, int], tp: int) -> int:
        """Of matrices between the residual stream and so many other numbers, which TP cuts."""
        return sum(lora.rank * (hidden + width // tp) for name, width in widths.items() if name in lora.targets)

    def mlp(width: int, tp: int) -> int:
        return pairs(dict.fromkeys(MLP_TARGETS, width), tp) if width else 0

    sparse = sum(layer // per_stage == stage for layer in shape.moe_layers)
    shared = mlp(shape.shared_expert_intermediate_size, dims.tp)
    count = per_stage * pairs(attention, dims.tp) + sparse * shared
    count += (per_stage - sparse) * mlp(shape.intermediate_size, dims.tp)
    return count, sparse * shape.num_experts // dims.ep * mlp(shape.moe_intermediate_size, 1)


def drafter_parameters(config: Config, shape: ArchitectureConfig) -> int:
    """Parameters of the trained drafter; its layer is counted in the policy's sizes. 0 without one."""
    speculation = config.rollout.speculation
    kind = speculation.trained
    return 0 if kind is None else kind.parameters(shape, config.rollout.speculation.drafted_tokens(shape.vocab_size))


def kv_bytes_per_token(config: Config, shape: ArchitectureConfig) -> int:
    """KV cache of one token of context on one rank of an engine; with a trained drafter also the drafter's."""
    heads, speculation = -(-shape.num_kv_heads // config.rollout.tp), config.rollout.speculation
    drafter = speculation.trained
    own = 0 if drafter is None else drafter.cached_layers
    keys_values = 2 * (shape.num_layers * heads + own * shape.num_kv_heads) * shape.head_dim
    is_read = drafter is not None and config.rollout.backend == "embedded"
    states = speculation.state_parts * is_read * shape.hidden_size
    # The cache has room for the experts' numbers, recorded or not.
    return (keys_values + states) * element_bytes(config.rollout.dtype) + routed_experts_bytes(shape)


def routed_experts_bytes(shape: ArchitectureConfig) -> int:
    """Bytes of the numbers of one token's experts, all layers: one byte each up to 256 experts, else two."""
    return shape.num_experts_per_tok * len(shape.moe_layers) * (1 if shape.num_experts <= 256 else 2)
