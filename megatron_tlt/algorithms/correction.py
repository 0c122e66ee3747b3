"""Truncated importance sampling for the mismatch between the engine that sampled and the actor that trains.

The engine's log-probs of the same tokens differ a little from the actor's (other kernels, other
precision), so rollouts are slightly off-policy even in the first update. Legend: T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_tlt.algorithms.kl import LOG_RATIO_LIMIT, k3


def importance_weights(log_ratio: Tensor, cap: float) -> Tensor:
    """[T] min(exp(log actor - log engine), cap), without gradient; ones when `cap` is 0.

    Truncation bounds the variance at the price of a bias (Ionides 2008, "Truncated importance sampling").
    """
    if cap == 0:
        return torch.ones_like(log_ratio)
    return log_ratio.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=cap)


def mismatch_sums(log_ratio: Tensor, weights: Tensor, mask: Tensor, cap: float) -> dict[str, Tensor]:
    """0-d sums over unmasked tokens of log_ratio = log actor - log engine [T], finite also where masked.

    `mismatch_k3` estimates KL(engine || actor), `mismatch_abs` is |log_ratio|, `importance_weight` the weight
    used, `importance_truncated` counts tokens at the cap.
    """
    log_ratio, absolute = log_ratio.detach(), log_ratio.detach().abs()
    truncated = (weights >= cap) if cap > 0 else torch.zeros_like(mask, dtype=torch.bool)
    return {
        "mismatch_k3": (k3(log_ratio) * mask).sum(),
        "mismatch_abs": (absolute * mask).sum(),
        "mismatch_abs_max": (absolute * mask).max() if len(mask) else mask.sum(),
        "importance_weight": (weights * mask).sum(),
        "importance_truncated": (truncated * mask).sum(),
    }
