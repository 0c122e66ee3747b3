"""Core attention of the local layers: packed rows, causal inside each sequence, grouped-query, any device.

Legend: T packed rows, n query heads, g key/value heads (of this TP rank), d width of a head.

megatron's own DotProductAttention refuses packed sequences and needs CUDA. One SDPA call per sequence
makes no T x T mask and costs the sum of the squared lengths; a block-diagonal mask was 3-5 times slower on
CPU. RoPE is applied here, by rows, from tables that are computed once a micro-batch: megatron computes them in every
layer, and for packed rows in a loop over the sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import megatron_tlt.actor.compat  # noqa: F401  (before megatron)
from megatron_tlt.actor.elementwise import Rotate
from megatron_tlt.models.decoders.torch.attention import heads_for

# isort: split
# megatron comes after compat.
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule


@dataclass
class PackedRows(PackedSeqParams):
    """Packed-sequence parameters with the lengths as Python ints too (no device sync in every layer).

    `runs` are (count, length) of neighbouring sequences of one length: they go through attention as one batch.
    `rotation` is RoPE's cos and sin of the rows in fp32, see there. Under context parallelism (`context_parallel.py`)
    runs and bounds are those of all ranks' rows: `to_whole` puts these rows, one rank after the other, into the
    micro-batch's order; `masks` are shared by the layers. `routing`: inputs of the routers (`routing.py`).
    """

    runs: tuple[tuple[int, int], ...] = ()
    rotation: tuple[Tensor, Tensor] | None = None
    to_whole: Tensor | None = None  # int64 [T]
    masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    routing: Any = None

    @property
    def starts(self) -> list[int]:
        """The first row of each sequence, padding included, then the number of all rows."""
        return [0, *accumulate(length for count, length in self.runs for _ in range(count))]


def inner_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type that attention of `dtype` computes in: fp32 at least on a CPU, where PyTorch's backward pass in bf16
    takes up to 4.5 times as long.
    """
    return torch.promote_types(dtype, torch.float32) if device.type == "cpu" else dtype


def rotation(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """RoPE's cos [T, 1, 1, d] and sin [T, 1, 1, d / 2], fp32, of the rows' positions [T].

    `inv_freq` ([d / 2] fp32) already holds any RoPE scaling.
    """
    angles = torch.outer(positions.float(), inv_freq)[:, None, None, :]
    cos = angles.cos()
    return torch.cat((cos, cos), dim=-1), angles.sin()


class SDPACoreAttention(MegatronModule):
    """softmax(q k^T / sqrt(d)) v within each packed sequence, q and k rotated by their positions (RoPE)."""

    def __init__(self, config: Any, softmax_scale: float | None = None, pg_collection: Any = None, **_: Any):
        super().__init__(config=config)
        assert not config.attention_dropout
        self.cp = pg_collection.cp
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedRows | None = None,
        **_: Any,
    ) -> Tensor:
        """query [T, 1, n, d], key and value [T, 1, g, d] -> [T, 1, n * d]."""
        assert packed_seq_params is not None and packed_seq_params.rotation is not None
        inner = inner_dtype(query.dtype, query.device)
        # Rotated in fp32, as in every engine and in Transformer Engine.
        q, k = (Rotate.apply(x.float(), *packed_seq_params.rotation).to(inner) for x in (query, key))
        return self.attend(q, k, value.to(inner), packed_seq_params).to(query.dtype)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, packing: PackedRows) -> Tensor:
        """`forward` of rotated queries and keys."""
        runs = packing.runs
        sizes = [count * length for count, length in runs]
        outputs = []
        for run, *parts in zip(runs, *(t.squeeze(1).split(sizes) for t in (query, key, value)), strict=True):
            q, k, v = (part.unflatten(0, run).transpose(1, 2) for part in parts)  # [count, heads, length, d]
            k, v = heads_for(q, k, v)
            grouped = q.size(1) != k.size(1)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=grouped)
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        packed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return packed.flatten(1).unsqueeze(1)
