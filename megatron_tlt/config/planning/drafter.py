"""Memory that training the drafter in idle time takes on one rank, beside the engine's own copy of its weights.

Legend: P parameters of the drafter, T tokens of a micro-step, H hidden, F intermediate, V vocabulary, A / K widths of
queries and of keys; t = rollout.tp; e bytes of an element of the drafter in training, s of the engine's.

* State, there all the time: weights `e*P`, whole on every rank; master, mean and two moments in fp32 over t (in fp32
  the weights are the master).
* A micro-step, in idle windows only: hidden states `T*H*s`; what the layer keeps for backward, `T*e*(10H + 3A + 2K +
  3F)` a drafted position, with a norm's input and output in fp32 of 4H; and the largest of (1) the loss: outputs,
  targets and gradient, `T*H*(12 + e)`, and four fp32 blocks of the LM head; (2) the MLP's way back, `T*e*(3F + H)` and
  the gradient of its last weight; (3) all gradients in fp32; with several ranks as they are, one in fp32 for the sum.
* Embedding and LM head are the engine's own tables. From a window to its merge the head is gathered with t > 1, and the
  C decoder's packed one is unpacked.
* Kind eagle3: hidden states of 4H; kept for backward `T*e*28H` more, of the first position 11H; the loss of normed
  outputs, and the gradient of its own LM head in fp32, twice once the blocks are gone.
* On the host: hidden states, the state where the window began, and the copy that a checkpoint is written from.

Compared with what the trainer allocates in tests/unit/config/planning/test_drafter_memory.py.
"""

from __future__ import annotations

from megatron_tlt.config.checks.layout import Device
from megatron_tlt.config.model import ArchitectureConfig
from megatron_tlt.config.planning.engine import has_packed_head
from megatron_tlt.config.planning.parameters import (
    MIB,
    drafter_parameters,
    element_bytes,
)
from megatron_tlt.config.planning.policy import micro_batch_tokens
from megatron_tlt.config.root import Config

HEAD_BLOCK = 1 << 25  # elements of [rows, V] that `drafter.loss` computes at a time; a test compares


def drafter_state_bytes(config: Config, shape: ArchitectureConfig, device: Device) -> int:
    """Weights, their mean, two moments; in bf16 a master copy as well."""
    if not config.idle.train_drafter:
        return 0
    weights = element_bytes(config.drafter.sizes(device).dtype)
    sharded = (4 if weights < 4 else 0) + 12
    count = drafter_parameters(config, shape)
    return count * weights + count * sharded // config.rollout.tp


def drafter_step_bytes(config: Config, shape: ArchitectureConfig, device: Device) -> int:
    """Gradients, activations and temporaries of one micro-step."""
    kind = config.rollout.speculation.trained
    if not config.idle.train_drafter or kind is None:
        return 0
    steps = config.drafter.online_draft_steps(kind)
    sizes, hidden, several = config.drafter.sizes(device), shape.hidden_size, config.rollout.tp > 1
    tokens, element, inter = sizes.micro_step_tokens, element_bytes(sizes.dtype), shape.intermediate_size
    kept = tokens * element * kind.kept_elements(shape, steps)
    blocks = 4 * 4 * min(HEAD_BLOCK, tokens * shape.vocab_size)
    loss = kept + tokens * hidden * (12 + element) + blocks
    if kind.has_own_head:
        head = 4 * kind.head_elements(shape, config.rollout.speculation.draft_vocab_size)
        loss = kept + tokens * hidden * (20 + element) + max(blocks + head, 2 * head)
    back = kept + element * (tokens * (3 * inter + hidden) + inter * hidden)
    count = drafter_parameters(config, shape)
    gradients = element * count + _summed_bytes(config, shape) if several else 4 * count
    states = kind.state_parts * tokens * hidden * element_bytes(config.rollout.dtype)
    return states + max(loss, back, gradients)


def drafter_head_bytes(config: Config, shape: ArchitectureConfig, device: Device) -> int:
    """The LM head from a window's first micro-step to its merge, where the engine's is not contiguous."""
    packed = has_packed_head(config, device)
    is_contiguous = shape.tie_word_embeddings or not (packed or config.rollout.tp > 1)
    if not config.idle.train_drafter or is_contiguous:
        return 0
    return shape.vocab_size * shape.hidden_size * element_bytes(config.rollout.dtype)


def drafter_merge_bytes(config: Config, shape: ArchitectureConfig) -> int:
    """The parameter that replicas' drafters are merged by."""
    return _summed_bytes(config, shape) if config.idle.train_drafter else 0


def _summed_bytes(config: Config, shape: ArchitectureConfig) -> int:
    """The largest parameter in fp32: ranks are summed over parameter by parameter."""
    speculation = config.rollout.speculation
    kind = speculation.trained
    return 0 if kind is None else 4 * kind.largest_parameter(shape, speculation.draft_vocab_size)


def drafter_push_bytes(config: Config, shape: ArchitectureConfig, device: Device) -> int:
    """The mean as it goes to the engine."""
    if not config.idle.train_drafter:
        return 0
    return drafter_parameters(config, shape) * element_bytes(config.drafter.sizes(device).dtype)


def hidden_state_bytes(config: Config, device: Device) -> int:
    """The buffer of hidden states in the host's memory, and as much for those on their way from the actor."""
    if not config.idle.train_drafter:
        return 0
    return int(config.drafter.sizes(device).buffer_mib * MIB) * (1 + (config.hidden_states_of == "actor"))


def collected_bytes(config: Config, shape: ArchitectureConfig) -> int:
    """Hidden states of a micro-batch as the actor hands them out: the rows to be copied and, under sequence or context
    parallel, all of them gathered before; under context parallel twice, for they are put in order.
    """
    if not config.idle.train_drafter or config.hidden_states_of == "engine":
        return 0
    actor = config.actor
    copies = 2 if actor.cp > 1 else int(actor.sequence_parallel)
    row = element_bytes(config.rollout.dtype) + element_bytes(actor.dtype) * copies
    return micro_batch_tokens(config) * actor.cp * config.rollout.speculation.state_parts * shape.hidden_size * row


def drafter_save_bytes(config: Config, shape: ArchitectureConfig) -> int:
    """The copy that a checkpoint is written from, in the host's memory of the first rank."""
    return 16 * drafter_parameters(config, shape) if config.idle.train_drafter else 0
