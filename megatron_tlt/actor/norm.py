"""RMSNorm of the local layer spec, also under sequence parallel, which megatron's torch wrapper refuses."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_tlt.actor.device import current_device
from megatron_tlt.actor.elementwise import RMSNormFunction


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in the signature megatron's layer specs call."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__()
        self.eps = eps
        self.shape = (hidden_size,)
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=current_device())
        )
        # finalize_model_grads sums the gradients of weights so marked over TP: each rank saw its rows only.
        marked: Any = self.weight
        marked.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as `x`."""
        if x.dtype is torch.float32 and x.device.type == "cpu":
            return RMSNormFunction.apply(x, self.weight, self.eps)  # type: ignore[no-any-return]
        return F.rms_norm(x, self.shape, self.weight, self.eps)
