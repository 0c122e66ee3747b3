"""Per-token estimators of KL(policy || reference) from tokens the policy sampled.

Legend: T tokens. Source: J. Schulman, "Approximating KL divergence" (2020), with r = reference / policy.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]

# exp(20) is 5e8: beyond it a log-ratio is a broken token, and its exponential would drown the batch.
LOG_RATIO_LIMIT = 20.0


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """[T] estimates, differentiable in `logprobs`.

    k1 = -log r (unbiased, noisy), k2 = (log r)^2 / 2 (biased, its gradient is the KL's), k3 = r - 1 - log r
    (unbiased, never negative).
    """
    log_r = reference - logprobs
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return 0.5 * log_r.square()
    return k3(log_r)


def k3(log_r: Tensor) -> Tensor:
    """[T] r - 1 - log r, with log r limited so that it stays finite."""
    limited = log_r.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(limited) - limited
