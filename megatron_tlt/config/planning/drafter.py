"""Memory that training the drafter in idle time takes on one rank, beside the engine's own copy of its weights.

Legend: P parameters of the drafter, T tokens of a micro-step, H hidden, F intermediate, V vocabulary, A / K widths of
queries and of keys; t = rollout.tp; e bytes of an element of the drafter in training, s of the engine's.

* State, there all the time: weights `e*P`, whole on every rank; master, mean and two moments in fp32 over t (in fp32
  the weights are the master).
* A micro-step, in idle windows only: hidden states `T*H*s`; what the layer keeps for backward, `T*e*(10H + 3A + 2K +
  3F)` a drafted position, with a norm's input and output in fp32 of 4H; and the largest of (1) the loss: outputs,
  targets and gradient, `T*H*(12 + e)`, four fp32 blocks of the LM head and, of a reduced vocabulary, its rows; (2)
  the MLP's way back, `T*e*(3F + H)` and the gradient of its last weight; (3) all gradients in fp32; with several
  ranks as they are, one in fp32 for the sum.
* Embedding and LM head are the engine's own tables. From a window to its merge the head is gathered with t > 1, and the
  C decoder's packed one is unpacked.
* Kind eagle3: hidden states of 4H; kept for backward `T*e*21H` more, of the first position 4H; the loss of normed
  outputs, and the gradient of its own LM head in fp32, twice once the blocks are gone.
* On the host: hidden states, the state where the window began, and the copy that a checkpoint is written from.

Compared with the trainer's allocations in tests/unit/config/planning/test_drafter_memory.py.
"""

from __future__ import annotations

from megatron_tlt.config.checks.layout import Device
from megatron_tlt.config.drafter_kinds import DrafterFacts
from megatron_tlt.config.model import ArchitectureConfig
from megatron_tlt.config.planning.engine import has_packed_head, read_bytes
from megatron_tlt.config.planning.parameters import (
    MIB,
    drafter_parameters,
    element_bytes,
    pinned_bytes,
)
from megatron_tlt.config.planning.policy import micro_batch_tokens
from megatron_tlt.config.root import Config

HEAD_BLOCK = 1 << 25  # elements of [rows, V] that `drafters.loss` computes at a time: bounds its temporaries


PARTS = ("drafter training", "drafter step", "drafter's LM head", "drafter merge", "drafter weight sync",
         "actor's hidden states")  # fmt: skip
SAVE_COPY = "drafter in a save (rank 0)"  # once, not for every rank of a node
HOST_PARTS = ("hidden states", "drafter before a window", SAVE_COPY)


def training_parts(config: Config, shape: ArchitectureConfig, device: Device) -> dict[str, int]:
    """Bytes by `PARTS`; all 0 where no drafter is trained."""
    kind = config.rollout.speculation.trained
    if not config.idle.train_drafter or kind is None:
        return dict.fromkeys(PARTS, 0)
    tp, count = config.rollout.tp, drafter_parameters(config, shape)
    weights = element_bytes(config.drafter.sizes(device).dtype)
    sharded = (4 if weights < 4 else 0) + 12  # a master copy beside bf16 weights; their mean, two moments
    # Ranks are summed over parameter by parameter, in fp32.
    summed = 4 * kind.largest_parameter(shape, config.rollout.speculation.drafted_tokens(shape.vocab_size))
    gradients = weights * count + summed if tp > 1 else 4 * count
    is_contiguous = shape.tie_word_embeddings or not (has_packed_head(config, device) or tp > 1)
    head = 0 if is_contiguous else shape.vocab_size * shape.hidden_size * element_bytes(config.rollout.dtype)
    sizes = count * weights + count * sharded // tp, _step_bytes(config, shape, device, kind, gradients), head
    return dict(zip(PARTS, (*sizes, summed, count * weights, _collected_bytes(config, shape)), strict=True))


def host_parts(config: Config, shape: ArchitectureConfig, device: Device) -> dict[str, int]:
    """Bytes in the host's memory by `HOST_PARTS`; all 0 where no drafter is trained. The buffer of hidden states, and
    as much for those on their way from the actor, or one response's from the engine, pinned; the state that a window
    which fails goes back to; on the first rank the copy that a checkpoint is written from.
    """
    if not config.idle.train_drafter:
        return dict.fromkeys(HOST_PARTS, 0)
    buffer = int(config.drafter.sizes(device).buffer_mib * MIB) * (1 + (config.hidden_states_of == "actor"))
    buffer += pinned_bytes(read_bytes(config, shape, device))
    state = training_parts(config, shape, device)["drafter training"]
    before = state if device == "cpu" else pinned_bytes(state)
    return dict(zip(HOST_PARTS, (buffer, before, 16 * drafter_parameters(config, shape)), strict=True))


def _step_bytes(config: Config, shape: ArchitectureConfig, device: Device, kind: DrafterFacts, gradients: int) -> int:
    """Gradients, activations and temporaries of one micro-step."""
    sizes, hidden, inter = config.drafter.sizes(device), shape.hidden_size, shape.intermediate_size
    tokens, element = sizes.micro_step_tokens, element_bytes(sizes.dtype)
    kept = tokens * element * kind.kept_elements(shape, config.drafter.online_draft_steps(kind))
    drafted = config.rollout.speculation.drafted_tokens(shape.vocab_size)
    blocks = 4 * 4 * min(HEAD_BLOCK, tokens * drafted)
    rows = drafted * hidden * element_bytes(config.rollout.dtype) if drafted < shape.vocab_size else 0
    if device == "cpu" and config.rollout.dtype == "bf16":
        rows += 4 * drafted * hidden  # a processor without products of bf16 multiplies them in fp32
    loss = kept + tokens * hidden * (12 + element) + blocks + rows
    if kind.has_own_head:
        head = 4 * kind.head_elements(shape, config.rollout.speculation.drafted_tokens(shape.vocab_size))
        loss = kept + tokens * hidden * (20 + element) + max(blocks + head, 2 * head)
    back = kept + element * (tokens * (3 * inter + hidden) + inter * hidden)
    states = kind.state_parts * tokens * hidden * element_bytes(config.rollout.dtype)
    return states + max(loss, back, gradients)


def _collected_bytes(config: Config, shape: ArchitectureConfig) -> int:
    """Hidden states of a micro-batch as the actor hands them out: the rows to be copied and, under sequence or context
    parallel, all of them gathered before; under context parallel twice, for they are put in order.
    """
    if config.hidden_states_of == "engine":
        return 0
    actor = config.actor
    copies = 2 if actor.cp > 1 else int(actor.sequence_parallel)
    row = element_bytes(config.rollout.dtype) + element_bytes(actor.dtype) * copies
    return micro_batch_tokens(config) * actor.cp * config.rollout.speculation.state_parts * shape.hidden_size * row
