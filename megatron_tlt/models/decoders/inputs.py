"""Input and output of one forward pass of a rollout decoder.

Legend: T new tokens of all sequences, packed; S sequences; R rows whose logits are wanted;
V vocabulary; W width of a row's state (`base.Decoder`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class HostLengths:
    """Lengths of a batch on the device, known to the host: reading them on the device would wait."""

    rows: Sequence[int]  # [S], rows of each sequence
    longest: int  # the largest of `context_lens`


@dataclass(slots=True)
class DecoderInput:
    """One ragged batch of prefill chunks and decode tokens.

    Sequence `s` owns rows `query_start[s]:query_start[s+1]`; its row `i` attends to every cached position
    `<= positions[i]` of the same sequence (the row's own key and value are written first).
    """

    token_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32, position in the sequence, used by RoPE and by causality
    slot_mapping: Tensor  # [T] int32, block * block_size + offset: where this row's key and value go
    query_start: Tensor  # [S + 1] int32
    context_lens: Tensor  # [S] int32, cached tokens of the sequence after this forward
    block_tables: Tensor  # [S, max_blocks] int32
    logit_rows: Tensor  # [R] int32 ascending, each once: rows of the T hidden states that go through the LM head
    all_hidden: bool = False  # also return the rows' states
    lengths: HostLengths | None = None  # where the batch is not in the host's memory
    all_routed_experts: bool = False  # also return the experts of all T rows, of a model that has some

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> DecoderInput:
        """From the first seven fields in order."""
        return cls(*tensors)  # type: ignore[arg-type]  # the last three fields keep their defaults


@dataclass(slots=True)
class DecoderOutput:
    """Logits of the wanted rows, states and experts of all rows."""

    logits: Tensor  # [R, V] float32 (of graphs: compute type), full vocabulary on every tensor-parallel rank
    hidden: Tensor | None = None  # [T, W] in the compute type, if `all_hidden`
    # [T, layers with experts * k] of type `experts.route_type`, if `all_routed_experts`: each row's experts, best first
    routed_experts: Tensor | None = None
    slots: Tensor | None = None  # [T] int32, of graphs that return either: the batch's slot mapping on the device
