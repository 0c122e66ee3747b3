"""Memory of the Megatron policy on one rank: optimizer, an update's temporaries, those of a weight sync.

Legend: P parameters on this rank, V vocabulary, H hidden, F intermediate, e bytes of an element, d data parallel size.
Of experts d is the number of ranks that hold the same ones: those of a pipeline stage over EP.

* Weights, gradients, optimizer (Adam): `4P + 4P + 8P` in fp32; in bf16 `2P + 4P + 12P` (gradients are reduced
  in fp32; the optimizer holds an fp32 master copy and two moments). The distributed optimizer divides the
  last term by the data parallel size: the `6 + 12/d` bytes a parameter of megatron-core's distributed
  optimizer documentation, stage 1 of Rajbhandari et al., arXiv 1910.02054, section 5.
* With adapters (`actor.lora`) P of gradients and optimizer are theirs; the weights are there once, for the reference,
  too; and one weight at a time is merged, in a forward pass or a weight sync.
* A frozen model that is scored beside the policy (`Config.frozen_shape`): its weights in the actor's layout and type.
* Activations, the LM head and temporaries of the backward pass: `activations.py`.
* Transformer Engine's layers read one table of rotations, which stays.
* A weight sync gathers one tensor after the other: its parts and their join, and the bucket that collects them.
"""

from __future__ import annotations

from megatron_tlt.config.checks.layout import Device
from megatron_tlt.config.dims import Dims
from megatron_tlt.config.model import ArchitectureConfig
from megatron_tlt.config.planning.parameters import MIB, element_bytes
from megatron_tlt.config.root import Config, TrainingConfig


def optimizer_bytes(config: TrainingConfig, parameters: int, experts: int, dims: Dims, device: Device) -> int:
    """Master weights and moments of one rank: of `parameters` that are no experts', and of its `experts`'."""
    master = 4 if config.actor.dtype == "bf16" else 0
    moments = 8 if config.optimizer.name == "adam" else 0
    if not config.actor.shards_optimizer(config.optimizer, device == "cuda"):
        return (parameters + experts) * (master + moments)
    replicas = dims.dp * dims.cp
    return (master + moments) * (parameters // replicas + experts * dims.ep // (replicas * dims.tp))


def dummy_gradient_bytes(
    config: TrainingConfig, shape: ArchitectureConfig, dims: Dims, stage: int, device: Device
) -> int:
    """Buffers of Transformer Engine from the first update on: one of each shape of a linear layer's weight.

    A linear layer adds its gradient to the gradient buffer itself and returns one of these in its place
    (`get_dummy_wgrad`; megatron's LM head does the same). The experts' grouped products have none.
    """
    if device != "cuda" or config.actor.layer_spec == "local" or config.actor.lora is not None:
        return 0
    hidden, tp = shape.hidden_size, dims.tp
    heads, groups = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    dense = shape.intermediate_size if len(shape.moe_layers) < shape.num_layers else 0
    shapes = {((heads + 2 * groups) // tp, hidden), (hidden, heads // tp)}
    for width in (dense, shape.shared_expert_intermediate_size):
        shapes |= {(2 * width // tp, hidden), (hidden, width // tp)}
    if stage == dims.pp - 1:
        shapes.add((-(-shape.vocab_size // tp), hidden))
    return element_bytes(config.actor.dtype) * sum(rows * columns for rows, columns in shapes)


def micro_batch_tokens(config: TrainingConfig) -> int:
    """T: the packing budget, or one longest sequence when that is more, split over context parallel ranks."""
    return -(-max(config.actor.micro_batch_tokens, config.longest_trained) // config.actor.cp)


def rotation_rows(max_context: int, tp: int, cp: int) -> int:
    """Rows of Transformer Engine's table of rotations: every sequence's, padded to 2 cp rows, and those of padding."""
    return max_context + 2 * cp * tp


def rotation_bytes(config: TrainingConfig, shape: ArchitectureConfig, dims: Dims, device: Device) -> int:
    """The tables of policy and reference, in fp32; the local layers make theirs for each micro-batch."""
    if device != "cuda" or config.actor.layer_spec == "local":
        return 0
    frozen = config.frozen_shape(shape)
    widths = shape.head_dim + (0 if frozen is None else frozen.head_dim)
    return rotation_rows(config.model.max_context, dims.tp, dims.cp) * widths * 4


def weight_sync_bytes(config: Config, shape: ArchitectureConfig, dims: Dims) -> int:
    """A bucket of full tensors, and the parts and the join of the largest one where ranks hold parts."""
    widths = 2 * shape.intermediate_size, 2 * shape.num_experts * shape.moe_intermediate_size  # experts are one stack
    largest = max(shape.vocab_size, *widths) * shape.hidden_size * element_bytes(config.actor.dtype)
    bucket = max(config.sync.bucket_mib * MIB, largest)
    bucket += merged_bytes(config, shape, dims)
    return bucket if dims.tp * dims.pp * dims.ep == 1 else bucket + 2 * largest


def merged_bytes(config: TrainingConfig, shape: ArchitectureConfig, dims: Dims) -> int:
    """The largest weight with its adapters, made for one product, and the change to half of it; 0 without adapters."""
    if config.actor.lora is None:
        return 0
    dense = shape.intermediate_size if len(shape.moe_layers) < shape.num_layers else 0
    widths = dense // dims.tp, shape.shared_expert_intermediate_size // dims.tp
    width = max(*widths, shape.num_experts // dims.ep * shape.moe_intermediate_size)
    return 3 * width * shape.hidden_size * element_bytes(config.actor.dtype)
