"""The modules that megatron-core's layers are made of. Legend: T rows, n query and g key/value heads, d head width."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import distributed as distributed
from .attention.rope import positions
from .module.base import WeightProduct

# megatron-core derives a class from the first and names the others in signatures.
GroupedLinear = nn.Module
ops = SimpleNamespace(Sequential=object, FusibleOperation=object)


class _Module(nn.Module):
    """Extra state as without FP8: an empty tensor of bytes, of norms and attention, too."""

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        assert state is None or state.numel() == 0


class RMSNorm(_Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        sequence_parallel: bool,
        params_dtype: torch.dtype,
        device: Any,
        zero_centered_gamma: bool,
    ):
        super().__init__()
        assert not zero_centered_gamma
        self.eps = eps
        self.weight = _parameter(hidden_size, dtype=params_dtype, device=device)
        nn.init.ones_(self.weight)
        _mark(self.weight, sequence_parallel=sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Linear(_Module):
    """x weight^T + bias over the TP ranks of `tp_group`.

    "column": of the rows of all ranks under sequence parallel, else of rows that all have; "row": summed over the
    ranks, and under sequence parallel each rank keeps its rows.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool,
        fuse_wgrad_accumulation: bool,
        tp_group: Any,
        tp_size: int,
        init_method: Any,
        bias: bool,
        return_bias: bool,
        parallel_mode: str | None,
        params_dtype: torch.dtype,
        device: Any,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
    ):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        if parallel_mode == "column":
            self.out_features //= tp_size
        elif parallel_mode == "row":
            self.in_features //= tp_size
        self.parallel_mode, self.tp_group, self.tp_size = parallel_mode, tp_group, tp_size
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.use_bias, self.return_bias = bias, return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.weight = _parameter(self.out_features, self.in_features, dtype=params_dtype, device=device)
        init_method(self.weight)
        _mark(self.weight, **_cut(1 if parallel_mode == "row" else 0))
        self.bias: Tensor = torch.empty(0, dtype=params_dtype, device=device)  # no parameter
        if bias:
            del self.bias
            self.bias = _parameter(self.out_features, dtype=params_dtype, device=device)
            nn.init.zeros_(self.bias)
            is_row = parallel_mode == "row"
            _mark(self.bias, **({"sequence_parallel": self.sequence_parallel} if is_row else _cut(0)))

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        from megatron.core.tensor_parallel import mappings  # which imports this package

        group, mode = self.tp_group, self.parallel_mode if self.tp_size > 1 else None
        if mode == "column" and self.sequence_parallel:
            x = mappings.gather_from_sequence_parallel_region(x, group=group)
        elif mode == "column":
            x = mappings.copy_to_tensor_model_parallel_region(x, group=group)
        y: Tensor = WeightProduct.apply(x, self.weight, self.fuse_wgrad_accumulation, is_first_microbatch)
        if mode == "row" and self.sequence_parallel:
            y = mappings.reduce_scatter_to_sequence_parallel_region(y, group=group)
        elif mode == "row":
            y = mappings.reduce_from_tensor_model_parallel_region(y, group=group)
        if self.return_bias:
            return y, self.bias
        return y + self.bias if self.use_bias else y


class LayerNormLinear(Linear):
    """RMSNorm, then `Linear`."""

    def __init__(self, in_features: int, out_features: int, *, eps: float, normalization: str, **options: Any):
        assert normalization == "RMSNorm" and not options.pop("zero_centered_gamma")
        assert not options.pop("return_layernorm_output")
        super().__init__(in_features, out_features, **options)
        self.eps = eps
        like = {"dtype": options["params_dtype"], "device": options["device"]}
        self.layer_norm_weight = _parameter(in_features, **like)
        nn.init.ones_(self.layer_norm_weight)
        _mark(self.layer_norm_weight, sequence_parallel=self.sequence_parallel)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        weight = self.layer_norm_weight
        return super().forward(F.rms_norm(x, weight.shape, weight, self.eps), is_first_microbatch)


class DotProductAttention(_Module):
    """Causal attention within each of the packed sequences (thd). Context parallel ranks gather keys and values."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        *,
        num_gqa_groups: int,
        attention_dropout: float,
        softmax_scale: float | None,
        cp_group: Any = None,
        **_: Any,
    ):
        super().__init__()
        assert not attention_dropout
        self.scale, self.cp_group = softmax_scale, cp_group

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        *,
        qkv_format: str,
        attn_mask_type: str,
        cu_seqlens_q: Tensor,
        cu_seqlens_kv: Tensor,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        cu_seqlens_q_padded: Tensor | None,
        **_: Any,
    ) -> Tensor:
        """query [T, n, d], key and value [T, g, d] -> [T, n * d]; all ranks' sequences end at `cu_seqlens_q` int32."""
        assert (qkv_format, attn_mask_type) == ("thd", "padding_causal") and attention_mask is None
        assert cu_seqlens_q.dtype is torch.int32 and cu_seqlens_q is cu_seqlens_kv
        sizes = cu_seqlens_q.diff().tolist()
        assert max(sizes) <= max_seqlen_q == max_seqlen_kv
        cp, rank = (1, 0) if self.cp_group is None else (self.cp_group.size(), self.cp_group.rank())
        own = [positions(size, cp, rank) for size in sizes]
        if cp > 1:
            from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

            assert cu_seqlens_q_padded is cu_seqlens_q  # no gaps
            starts = cu_seqlens_q.tolist()
            by_rank = [start + positions(n, cp, r) for r in range(cp) for start, n in zip(starts, sizes, strict=False)]
            whole = torch.cat(by_rank).argsort()
            key, value = (gather_from_sequence_parallel_region(x, group=self.cp_group)[whole] for x in (key, value))
        queries = query.split([len(rows) for rows in own])
        outputs = [
            F.scaled_dot_product_attention(
                *(part.transpose(0, 1) for part in parts),
                attn_mask=rows[:, None] >= torch.arange(len(parts[1])),
                scale=self.scale,
                enable_gqa=True,
            ).transpose(0, 1)
            for rows, *parts in zip(own, queries, key.split(sizes), value.split(sizes), strict=True)
        ]
        return torch.cat(outputs).flatten(1)


def _parameter(*shape: int, **like: Any) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, **like))


def _cut(dim: int) -> dict[str, Any]:
    return {"tensor_model_parallel": True, "partition_dim": dim, "partition_stride": 1}


def _mark(parameter: Tensor, **marks: Any) -> None:
    for name, value in marks.items():
        setattr(parameter, name, value)
