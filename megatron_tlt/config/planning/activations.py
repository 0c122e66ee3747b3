"""Memory of an update beside weights, gradients and optimizer state: activations, LM head, temporaries.

Legend: T tokens of a micro-batch on this rank, H hidden, F intermediate, V vocabulary, d head width, A / K query /
key-value heads, L layers, t = tp, s = t with sequence parallelism, else 1; e bytes of an element; E experts, k a token,
G the width of one, R rows that reach this rank's.

* One decoder layer keeps for backward, tensor by tensor as Korthikanti et al., arXiv 2205.05198, section 4, do for GPT,
  here for GQA, SwiGLU and fused attention (no A*T*T term): `T*e*(h*H/s + (a*A + k*K)*d/t + 3*F/t)`. Of the MLP
  that is both halves of fc1's output and its activation. h = 4: each norm keeps its input and its output (in bf16 on
  CPU 12, for that norm computes in fp32, operation by operation). Local layers on CPU: a = k = 3; with norms of queries
  and keys a = 5, k = 4. CUDA: with such norms a and k less two and one.
* Selective recompute keeps of these: with `layernorm` no output of a norm (CUDA), with `mlp_act` no activation, with
  `mlp` nothing inside of the MLP (CUDA: nor its norm's output, which Transformer Engine has inside). The modules that
  are computed again exist during their layer's backward pass.
* A layer with experts has in the MLP's place `R*e*(H + 4*G)` (their input, fc1's output, its activation before and
  after the gates), with `mlp_act` two G less; four tables of the router, fp32 [T/s, E]; and the shared expert's MLP. R
  is `2*k*T/s`: twice the even share, a guess.
* Full recompute (section 5) keeps `T*e*H/s` a layer, and one layer in full with its gradients during its backward pass.
* 1F1B keeps min(pp - stage, micro-batches) micro-batches alive on a stage (section 4.2.3).
* Context parallelism (c ranks): T is this rank's share. p2p keeps what one rank keeps, and while a layer's attention
  runs the outputs of c steps, keys and values that arrive and leave, and their gradients, `T*e*(c*A + 8*K)*d/t`;
  all_gather keeps keys and values of all ranks, `2*c*K`, and has them thrice; its masks on CPU (two of a length, shared
  by layers) have a row for each of a rank's, a column for each before it.
* The last stage: the final norm and the rows for the head, `4*T*e*H`; logits and their gradient, `2*T*e*V/t`; and the
  larger of the chunks in which `actor/logprob.py` computes (four, fp32) and the head's weight gradient, `e*H*V/t`.
* With adapters the head has no weight gradient, and one layer's weight at a time is merged (`policy.merged_bytes`).

Measured against what PyTorch allocates in tests/mpi/test_memory_estimate.py (CPU, local layers).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from megatron_tlt.config.checks.layout import Device
from megatron_tlt.config.model import ArchitectureConfig

# Elements of one fp32 chunk in `actor.logprob`; a test compares.
CHUNK_ELEMENTS: dict[Device, int] = {"cpu": 1 << 19, "cuda": 1 << 26}
_CHUNKS = 4  # alive at once in its backward
_IMBALANCE = 2  # rows of a rank's experts over the even share


@dataclass(frozen=True, slots=True)
class Slice:
    """One rank's part of a micro-batch and of the model."""

    tokens: int  # T
    element: int  # e
    tp: int  # t
    sequence: int  # s
    layers: float  # of this stage, without experts
    in_flight: int  # micro-batches
    is_last: bool
    device: Device
    cp: int = 1  # c
    comm: str = "p2p"  # of context parallel attention
    longest: int = 0  # tokens of the longest sequence, over all c ranks
    expert_layers: float = 0  # of this stage
    merged: int = 0  # bytes of a weight that is merged with its adapters; 0: there are none


def layer_bytes(
    shape: ArchitectureConfig, at: Slice, redone: Collection[str] = (), has_experts: bool = False
) -> float:
    """Bytes that a layer keeps for backward, if the modules `redone` (`actor.recompute_modules`) are computed again."""
    normed = shape.family in ("qwen3", "qwen3_moe")
    fused = at.device == "cuda"
    h = 12 if at.element == 2 and not fused else 4
    if fused and "layernorm" in redone:
        h = 2
    elif fused and "mlp" in redone:
        h = 3
    f = 0 if "mlp" in redone else 2 if "mlp_act" in redone else 3
    a, k = (5 - 2 * fused, 4 - fused) if normed else (3, 3)
    if at.cp > 1 and at.comm == "all_gather":
        k += 2 * at.cp - 2
    heads = (a * shape.num_heads + k * shape.num_kv_heads) * shape.head_dim
    width = shape.shared_expert_intermediate_size if has_experts else shape.intermediate_size
    wide = (heads + f * width) / at.tp
    kept = at.tokens * at.element * (h * shape.hidden_size / at.sequence + wide)
    if not has_experts or "mlp" in redone:
        return kept
    gates = 2 if "mlp_act" in redone else 4
    experts = _expert_rows(shape, at) * at.element * (shape.hidden_size + gates * shape.moe_intermediate_size)
    return kept + experts + 4 * 4 * at.tokens / at.sequence * shape.num_experts


def _expert_rows(shape: ArchitectureConfig, at: Slice) -> float:
    return _IMBALANCE * shape.num_experts_per_tok * at.tokens / at.sequence


def gradient_bytes(shape: ArchitectureConfig, at: Slice) -> float:
    """Temporaries of one layer's way back; of experts also their rows on the way to their ranks and back."""
    wide = 2 * shape.hidden_size / at.sequence + 2 * shape.intermediate_size / at.tp
    rows = _expert_rows(shape, at) * (3 * shape.hidden_size + 3 * shape.moe_intermediate_size)
    return at.element * (at.tokens * wide + (rows if at.expert_layers else 0))


def attention_bytes(shape: ArchitectureConfig, at: Slice) -> float:
    """Temporaries of one layer's context parallel attention."""
    A, K = shape.num_heads, shape.num_kv_heads
    heads = at.cp * A + 8 * K if at.comm == "p2p" else 6 * at.cp * K
    return at.tokens * at.element * heads * shape.head_dim / at.tp if at.cp > 1 else 0.0


def mask_bytes(at: Slice) -> float:
    """Masks of a micro-batch: see the module."""
    if at.cp == 1 or at.comm != "all_gather" or at.device == "cuda":
        return 0.0
    return (at.longest / (2 * at.cp)) ** 2 * (2 * at.cp + 1) * at.element


def head_bytes(shape: ArchitectureConfig, at: Slice) -> float:
    """Final norm, LM head and loss of one micro-batch, forward and backward."""
    logits = at.tokens * shape.vocab_size / at.tp
    chunks = _CHUNKS * 4 * min(logits, CHUNK_ELEMENTS[at.device])
    weight = 0 if at.merged else shape.hidden_size * shape.vocab_size / at.tp * at.element
    return at.element * (4 * at.tokens * shape.hidden_size + 2 * logits) + max(chunks, weight)


def forward_bytes(shape: ArchitectureConfig, at: Slice) -> int:
    """The most that lives at once in forward passes without gradients, one micro-batch after the other: the residual
    stream, the logits of the micro-batch before, and one layer or the logits with their fp32 chunks.

    An upper bound, for a layer's parts are not all there together: 1.07 to 1.17 times what PyTorch allocates (CPU).
    """
    kinds = [has_experts for layers, has_experts in ((at.layers, False), (at.expert_layers, True)) if layers]
    layer = max(layer_bytes(shape, at, (), has_experts) for has_experts in kinds) + attention_bytes(shape, at)
    stream = 2 * at.tokens * at.element * shape.hidden_size / at.sequence + mask_bytes(at)
    if not at.is_last:
        return int(stream + layer)
    logits = at.tokens * shape.vocab_size / at.tp
    chunks = _CHUNKS * 4 * min(logits, CHUNK_ELEMENTS[at.device])
    head = at.element * (at.tokens * shape.hidden_size + logits) + chunks
    return int(stream + at.element * logits + max(layer, head))


def update_bytes(shape: ArchitectureConfig, at: Slice, recompute: str, modules: Collection[str] = ()) -> int:
    """The most that lives at once in an update. `modules`: those that selective recompute redoes."""
    total = again = 0.0
    for layers, has_experts in ((at.layers, False), (at.expert_layers, True)):
        layer = layer_bytes(shape, at, (), has_experts) if layers else 0.0
        kept = at.tokens * at.element * shape.hidden_size / at.sequence
        redone = layer
        if recompute != "full":
            kept = layer_bytes(shape, at, modules if recompute == "selective" else (), has_experts)
            redone = layer - kept
        total += layers * kept
        again = max(again, redone)
    again += max(gradient_bytes(shape, at), attention_bytes(shape, at), at.merged)
    head = head_bytes(shape, at) if at.is_last else 0
    return int(at.in_flight * (total + mask_bytes(at)) + max(head, again))
