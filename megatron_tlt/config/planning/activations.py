"""Memory of an update beside weights, gradients and optimizer state: activations, LM head, temporaries.

An upper bound: tensors are counted as if the kernels of attention and MLP were not fused. Legend: T tokens of a
micro-batch on this rank, H hidden, F intermediate, V vocabulary, d head width, A / K query / key-value heads, t = tp, s
= t with sequence parallelism, else 1; c = cp; e bytes of an element; E experts, k a token, G the width of one.

* A decoder layer keeps for backward, as Korthikanti et al., arXiv 2205.05198, section 4, count GPT's, here for GQA,
  SwiGLU and attention without an A*T*T term: `T*e*(4H/s + (5A + 4K)*d/t + 3F/t)`. Each of two norms has its input and
  its output; 5A + 4K is 3A + 3K without norms of queries and keys. On CPU the e of these 3A + 3K is that of fp32. In
  fp32 on CUDA keys and values are kept for each query head (`heads_for`), 2A more; of all ranks, c + 1 times.
* Selective recompute: with `layernorm` no output of a norm is kept (`layer_spec: transformer_engine`), with `mlp_act`
  no activation, with `mlp` nothing of the MLP; full recompute (section 5): `T*e*H/s` a layer. What one layer computes
  again exists during its backward pass, with its gradients.
* Experts, in the MLP's place: `R*e*(H + 4*G)` of R = 2*k*T/s rows, twice the even share (an assumption; in bf16 on
  CPU 128 a local expert more, `experts.py`), four fp32 tables of the router, and the shared expert's MLP.
* 1F1B keeps pp - stage micro-batches alive on a stage (section 4.2.3).
* Context parallelism gathers keys and values of all ranks, `2*c*K` more, and has them thrice in a backward pass; p2p
  (Transformer Engine) has outputs of c steps, and keys and values that arrive and leave, `T*e*(c*A + 8*K)*d/t`. Masks
  of the local layers have a row for each of a rank's, a column for each before it.
* The last stage: a norm, the head's rows and their gradient, `5*T*e*H`; logits and their gradient,
  `2*T*e*V/t`; the larger of four fp32 chunks of `actor/logprob.py` and the head's weight gradient, `e*H*V/t`, which
  adapters do not have.
* On CUDA with `train.deterministic` flash attention's backward keeps a sum of gradients of queries for each processor:
  `4*T*d*(160 + A/t)`.
* With adapters one layer's weight at a time is merged (`policy.merged_bytes`).

tests/mpi/test_memory_estimate.py compares with what PyTorch allocates (CPU, local layers).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from megatron_tlt.config.checks.layout import Device
from megatron_tlt.config.dims import Dims
from megatron_tlt.config.model import ArchitectureConfig
from megatron_tlt.config.planning.parameters import element_bytes
from megatron_tlt.config.planning.policy import merged_bytes, micro_batch_tokens
from megatron_tlt.config.root import TrainingConfig

# Elements of one fp32 chunk in `actor.logprob`: 2 MB stays in a core's cache; 256 MB fills a GPU.
CHUNK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 26}
ROW_MULTIPLE = 128  # of rows of bf16 products on CPUs, `actor.microbatch`
_PROCESSORS = 160  # of the largest GPU, and a few


def activation_bytes(
    config: TrainingConfig, shape: ArchitectureConfig, dims: Dims, stage: int, device: Device = "cpu"
) -> int:
    """Bytes that an update takes on one rank of a stage beside its state, or a teacher's forward if that is more."""
    actor = config.actor
    engine = device == "cuda" and actor.layer_spec == "transformer_engine"  # auto may mean the local layers
    part = _Part(
        tokens=micro_batch_tokens(config),
        element=element_bytes(actor.dtype),
        tp=dims.tp,
        sequence=dims.tp if actor.sequence_parallel else 1,
        ep=dims.ep,
        cp=dims.cp,
        gathers=actor.cp_comm(engine) == "all_gather",
        redoes_norms=engine,
        is_deterministic=device == "cuda" and config.rl is not None and config.rl.train.is_deterministic(device),
        mask_rows=config.longest_trained / (2 * dims.cp),
        device=device,
        merged=merged_bytes(config, shape, dims),
        is_last=stage == dims.pp - 1,
    )
    redone = actor.recompute_modules if actor.recompute == "selective" else ()
    first, last = (at * shape.num_layers // dims.pp for at in (stage, stage + 1))
    total = again = 0.0
    for has_experts in {layer in shape.moe_layers for layer in range(first, last)}:
        count = sum((layer in shape.moe_layers) == has_experts for layer in range(first, last))
        layer = part.layer(shape, (), has_experts)
        kept = part.stream(shape) if actor.recompute == "full" else part.layer(shape, redone, has_experts)
        total += count * kept
        again = max(again, layer - kept * (actor.recompute != "full") + part.backward(shape, has_experts))
    needed = (dims.pp - stage) * (total + part.masks) + max(again, part.head(shape))
    frozen = config.frozen_shape(shape)
    if frozen is not None and frozen is not shape:
        layers = [part.layer(frozen, (), has_experts) for has_experts in {bool(frozen.moe_layers), False}]
        needed = max(needed, 2 * part.stream(frozen) + max(layers) + part.head(frozen))
    return int(needed)


@dataclass(frozen=True, slots=True)
class _Part:
    """One rank's part of a micro-batch; methods give bytes."""

    tokens: int  # T
    element: int  # e
    tp: int  # t
    sequence: int  # s
    ep: int
    cp: int  # c
    gathers: bool  # context parallel attention gathers keys and values
    redoes_norms: bool  # where `layernorm` is to be computed again
    is_deterministic: bool  # in forms that take more memory
    mask_rows: float  # of a mask
    device: Device
    merged: int  # bytes of a weight that is merged with its adapters; 0: there are none
    is_last: bool

    def stream(self, shape: ArchitectureConfig) -> float:
        """A layer's input."""
        return self.tokens * self.element * shape.hidden_size / self.sequence

    @property
    def inner(self) -> int:
        """Bytes of an element of attention."""
        return 4 if self.device == "cpu" else self.element

    def layer(self, shape: ArchitectureConfig, redone: Collection[str], has_experts: bool) -> float:
        """What a layer keeps for backward if the modules `redone` are computed again."""
        a, k = 3, 3
        k += 2 * self.cp * (self.cp > 1 and self.gathers)
        if self.device == "cuda" and self.element == 4 and shape.num_heads > shape.num_kv_heads:
            a += 2 * (self.cp + (self.cp > 1))
        inner = 0 if "mlp" in redone else 2 if "mlp_act" in redone else 3
        width = shape.shared_expert_intermediate_size if has_experts else shape.intermediate_size
        heads = (a * shape.num_heads + k * shape.num_kv_heads) * shape.head_dim
        has_norms = shape.family in ("qwen3", "qwen3_moe")  # of queries and keys
        normed = has_norms * (2 * shape.num_heads + shape.num_kv_heads) * shape.head_dim
        norms = 4 - 2 * ("layernorm" in redone and self.redoes_norms)
        wide = self.inner * heads + self.element * (normed + inner * width)
        kept = norms * self.stream(shape) + self.tokens * wide / self.tp
        if not has_experts or "mlp" in redone:
            return kept
        experts = self.element * (shape.hidden_size + 4 * shape.moe_intermediate_size) * self._rows(shape)
        return kept + experts + 4 * 4 * self.tokens / self.sequence * shape.num_experts

    def _rows(self, shape: ArchitectureConfig) -> float:
        """R."""
        padding = ROW_MULTIPLE * shape.num_experts / self.ep * (self.device == "cpu" and self.element == 2)
        return 2 * shape.num_experts_per_tok * self.tokens / self.sequence + padding

    def backward(self, shape: ArchitectureConfig, has_experts: bool) -> float:
        """Temporaries of one layer's way back: gradients of the MLP or of the experts, with their rows on the way to
        their ranks and back; attention's, and a merged weight.
        """
        wide = 2 * self.stream(shape) + self.element * self.tokens * 2 * shape.intermediate_size / self.tp
        if has_experts:
            wide += self.element * self._rows(shape) * 3 * (shape.hidden_size + shape.moe_intermediate_size)
        sums = 4 * self.tokens * shape.head_dim * (_PROCESSORS + shape.num_heads / self.tp) * self.is_deterministic
        wide = max(wide, sums, self.merged)
        if self.cp == 1:
            return wide
        heads = 6 * self.cp * shape.num_kv_heads if self.gathers else self.cp * shape.num_heads + 8 * shape.num_kv_heads
        return max(wide, sums + self.tokens * self.inner * heads * shape.head_dim / self.tp)

    @property
    def masks(self) -> float:
        """Of a micro-batch's gathering attention, all the while; kernels on CUDA need none."""
        rows = self.mask_rows * (self.cp > 1 and self.gathers and self.device == "cpu")
        return rows**2 * (2 * self.cp + 1) * self.inner

    def head(self, shape: ArchitectureConfig) -> float:
        """Final norm, LM head and loss, forward and backward; 0 on other stages than the last."""
        logits = self.tokens * shape.vocab_size / self.tp
        chunks = 4 * 4 * min(logits, CHUNK_ELEMENTS[self.device])
        weight = 0 if self.merged else shape.hidden_size * shape.vocab_size / self.tp * self.element
        rows = self.element * (5 * self.tokens * shape.hidden_size + 2 * logits)
        return self.is_last * (rows + max(chunks, weight))
