"""Memory that training the drafter in idle time takes on one rank, beside the engine's own copy of its weights.

Legend: P parameters of the drafter, T tokens of a micro-step, H hidden, F intermediate, V vocabulary, t = rollout.tp;
e bytes of an element.

* State, there all the time: on CUDA the weights in the engine's type, whole on every rank, and in fp32 master, mean and
  two moments, over t; in fp32 the weights are the master.
* A micro-step, in idle windows only: gradients, what the layer keeps for backward (`T*e*(9H + 4F)`: residual stream,
  its norm, embedding, hidden state, their join; the MLP's four products), and the LM head's block.
* Embedding and LM head are the engine's own tables; with t > 1 the head is gathered for a window.
* On the host: hidden states, the state where the window began, and the copy that a checkpoint is written from.
"""

from __future__ import annotations

from megatron_tlt.config.checks.layout import Device
from megatron_tlt.config.planning.parameters import MIB, drafter_parameters, element_bytes
from megatron_tlt.config.root import Config
from megatron_tlt.interfaces import ModelShape

_HEAD_BLOCK = 1 << 23  # elements of [rows, V] that the loss computes at a time
_HEAD_TEMPORARIES = 8  # fp32 tensors of that size that live at once
_MERGE_BUCKET = 64 * MIB


def drafter_state_bytes(config: Config, shape: ModelShape, device: Device) -> int:
    """Weights, their mean, two moments; in bf16 a master copy as well."""
    if not config.idle.train_drafter:
        return 0
    weights = element_bytes(config.rollout.dtype) if device == "cuda" else 4
    sharded = (4 if weights < 4 else 0) + 12
    return drafter_parameters(shape) * weights + drafter_parameters(shape) * sharded // config.rollout.tp


def drafter_step_bytes(config: Config, shape: ModelShape) -> int:
    """Gradients, activations and temporaries of one micro-step."""
    if not config.idle.train_drafter:
        return 0
    element, tokens = element_bytes(config.drafter.dtype), config.drafter.online.micro_step_tokens
    kept = tokens * element * (9 * shape.hidden_size + 4 * shape.intermediate_size)
    block = 4 * _HEAD_TEMPORARIES * min(_HEAD_BLOCK, tokens * shape.vocab_size)
    table = shape.vocab_size * shape.hidden_size * element_bytes(config.rollout.dtype)
    head = table if config.rollout.tp > 1 else 0
    return element_bytes(config.rollout.dtype) * drafter_parameters(shape) + kept + block + head


def drafter_merge_bytes(config: Config, shape: ModelShape) -> int:
    """The bucket through which replicas' drafters are merged."""
    return min(_MERGE_BUCKET, 16 * drafter_parameters(shape)) if config.idle.train_drafter else 0


def hidden_state_bytes(config: Config) -> int:
    """The buffer of hidden states to train on, in the host's memory."""
    return int(config.drafter.online.buffer_mib * MIB) if config.idle.train_drafter else 0


def drafter_copy_bytes(config: Config, shape: ModelShape) -> int:
    """The state where the window began, and the copy that a checkpoint is written from, in the host's memory."""
    return 2 * 16 * drafter_parameters(shape) // config.rollout.tp if config.idle.train_drafter else 0
