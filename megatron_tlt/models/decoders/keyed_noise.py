"""Keyed Gumbel noise in PyTorch, for the sampler and for drafters that propose in PyTorch (row keys: `keys.py`).

Torch multiplies and shifts int64 only, so the mixing function of `keys.py` is written out for it. Legend: R rows,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.models.decoders.keys import MIX_A, MIX_B, TOKEN_STEP


def _signed(value: int) -> int:
    """The int64 with the bits of a uint64."""
    return value - (1 << 64) if value >> 63 else value


# Draws tokens on CUDA: see `torch.kernels.sampling.draw`.
SampleKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], Tensor]

_A, _B, _STEP = _signed(MIX_A), _signed(MIX_B), _signed(TOKEN_STEP)


def key_tensor(keys: np.ndarray, device: torch.device | str = "cpu") -> Tensor:
    """uint64 [R] -> int64 [R] of the same bits: torch multiplies and shifts int64 only."""
    return torch.from_numpy(np.ascontiguousarray(keys).view(np.int64)).to(device)


def gumbel_noise(keys: Tensor, tokens: int | Tensor) -> Tensor:
    """Noise float32 [R, V] of row keys int64 [R] (`key_tensor`), on their device, for the first V tokens or for those
    of int64 [V] or [R, V].
    """
    ids = torch.arange(tokens, dtype=torch.int64, device=keys.device) if isinstance(tokens, int) else tokens
    z = keys[:, None] + (ids + 1) * _STEP
    z = (z ^ _shift(z, 30)) * _A
    z = (z ^ _shift(z, 27)) * _B
    m = _shift(z ^ _shift(z, 31), 40)
    # m + 1/2 does not fit float32 in the upper half: u would round to 1 and the noise to infinity once in 2^24 draws.
    # There 1 - u is exact instead.
    unit = 2.0**-24
    low = ((m.float() + 0.5) * unit).log()
    high = torch.log1p(-((((1 << 24) - 1 - m).float() + 0.5) * unit))
    return -torch.log(-torch.where(m >= 1 << 23, high, low))


def _shift(z: Tensor, count: int) -> Tensor:
    """Logical (zero-filling) right shift of int64."""
    return (z >> count) & ((1 << (64 - count)) - 1)


def perturbed(logits: Tensor, keys: Tensor, temperature: Tensor, tokens: Tensor | None = None) -> Tensor:
    """logits float32 [R, V] / T + noise; where temperature T [R] is 0 the logits themselves. `tokens` int64 [V]
    or [R, V] are those of the columns; None: all, in order.
    """
    t = temperature[:, None]
    noise = torch.where(t > 0, gumbel_noise(keys, logits.shape[1] if tokens is None else tokens), 0.0)
    return logits / torch.where(t > 0, t, 1.0) + noise


def best_candidates(
    logits: Tensor, keys: Tensor, temperature: Tensor, count: int, tokens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Scores float32 [R, count] and tokens [R, count] of the largest `perturbed` logits [R, V], best first. `tokens`:
    see `perturbed`; no noise is made for others.
    """
    best, chosen = perturbed(logits, keys, temperature, tokens).topk(count, dim=-1)
    return best, chosen if tokens is None else tokens.expand_as(logits).gather(1, chosen)
