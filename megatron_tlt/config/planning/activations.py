"""What an update takes beside weights, gradients and optimizer state: activations, LM head, temporaries.

Legend: T tokens of a micro-batch on this rank, H hidden, F intermediate, V vocabulary, d head width, A / K query /
key-value heads, L layers, t = tp, s = t with sequence parallelism, else 1; e bytes of an element.

* One decoder layer keeps for backward, tensor by tensor as Korthikanti et al., arXiv 2205.05198, section 4, do for GPT,
  here for GQA, SwiGLU and fused attention (no A*T*T term): `T*e*(h*H/s + (a*A + k*K)*d/t + 3*F/t)`. Of the MLP
  that is both halves of fc1's output and its activation. h = 4: each norm keeps its input and its output (in bf16 on
  CPU 12, for that norm computes in fp32, operation by operation). Local layers on CPU: a = k = 3; with norms of queries
  and keys a = 5, k = 4. CUDA: with such norms a and k less two and one.
* Full recompute (section 5) keeps `T*e*H/s` a layer, and one layer in full with its gradients while it goes back.
* 1F1B keeps min(pp - stage, micro-batches) micro-batches alive on a stage (section 4.2.3).
* The last stage: the final norm and the rows for the head, `4*T*e*H`; logits and their gradient, `2*T*e*V/t`; and the
  larger of the chunks in which `actor/logprob.py` computes (four, fp32) and the head's weight gradient, `e*H*V/t`.

Measured against what PyTorch allocates in tests/mpi/test_memory_estimate.py (CPU, local layers).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_tlt.config.checks.layout import Device
from megatron_tlt.interfaces import ModelShape

# Elements of one fp32 chunk in `actor.logprob`; a test compares.
CHUNK_ELEMENTS: dict[Device, int] = {"cpu": 1 << 19, "cuda": 1 << 26}
_CHUNKS = 4  # alive at once in its backward


@dataclass(frozen=True, slots=True)
class Slice:
    """What one rank has of a micro-batch and of the model."""

    tokens: int  # T
    element: int  # e
    tp: int  # t
    sequence: int  # s
    layers: float  # of this stage
    in_flight: int  # micro-batches
    is_last: bool
    device: Device


def layer_bytes(shape: ModelShape, at: Slice) -> float:
    """What one layer keeps for backward."""
    normed = shape.family == "qwen3"
    fused = at.device == "cuda"
    h = 12 if at.element == 2 and not fused else 4
    a, k = (5 - 2 * fused, 4 - fused) if normed else (3, 3)
    heads = (a * shape.num_heads + k * shape.num_kv_heads) * shape.head_dim
    wide = (heads + 3 * shape.intermediate_size) / at.tp
    return at.tokens * at.element * (h * shape.hidden_size / at.sequence + wide)


def gradient_bytes(shape: ModelShape, at: Slice) -> float:
    """Temporaries of one layer's way back."""
    wide = 2 * shape.hidden_size / at.sequence + 2 * shape.intermediate_size / at.tp
    return at.tokens * at.element * wide


def head_bytes(shape: ModelShape, at: Slice) -> float:
    """Final norm, LM head and loss of one micro-batch, forward and backward."""
    logits = at.tokens * shape.vocab_size / at.tp
    chunks = _CHUNKS * 4 * min(logits, CHUNK_ELEMENTS[at.device])
    weight = shape.hidden_size * shape.vocab_size / at.tp * at.element
    return at.element * (4 * at.tokens * shape.hidden_size + 2 * logits) + max(chunks, weight)


def update_bytes(shape: ModelShape, at: Slice, recompute: str) -> int:
    """The most that lives at once in an update."""
    layer = layer_bytes(shape, at)
    boundary = at.tokens * at.element * shape.hidden_size / at.sequence
    kept = boundary if recompute == "full" else layer
    again = (layer if recompute == "full" else 0) + gradient_bytes(shape, at)
    head = head_bytes(shape, at) if at.is_last else 0
    return int(at.in_flight * at.layers * kept + max(head, again))
