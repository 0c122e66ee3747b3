"""The sampler's keyed Gumbel noise, for drafters that propose in PyTorch: the same numbers, one floor below.

The formulas are those of `rollout/keys.py` and `rollout/sampler.py`; a test holds the two to the same bits.
Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_MIX_A, _MIX_B = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64's finaliser
_TOKEN_STEP = 0x9E3779B97F4A7C15
_POSITION_FACTOR = 0xE7037ED1A0B428DB


def _signed(value: int) -> int:
    """The int64 with the bits of a uint64."""
    return value - (1 << 64) if value >> 63 else value


_A, _B, _STEP = _signed(_MIX_A), _signed(_MIX_B), _signed(_TOKEN_STEP)


def row_keys(request_keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Row keys uint64 [R] of request keys uint64 [R] at output positions int [R]."""
    key: np.ndarray = (positions.astype(np.uint64) * np.uint64(_POSITION_FACTOR)) ^ request_keys
    key = (key ^ (key >> np.uint64(30))) * np.uint64(_MIX_A)
    key = (key ^ (key >> np.uint64(27))) * np.uint64(_MIX_B)
    return key ^ (key >> np.uint64(31))


def key_tensor(keys: np.ndarray, device: torch.device | str = "cpu") -> Tensor:
    """uint64 [R] -> int64 [R] of the same bits: torch multiplies and shifts int64 only."""
    return torch.from_numpy(np.ascontiguousarray(keys).view(np.int64)).to(device)


def gumbel_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """Noise float32 [R, V] of row keys int64 [R] (`key_tensor`), on their device."""
    z = keys[:, None] + torch.arange(1, vocab_size + 1, dtype=torch.int64, device=keys.device) * _STEP
    z = (z ^ _shift(z, 30)) * _A
    z = (z ^ _shift(z, 27)) * _B
    m = _shift(z ^ _shift(z, 31), 40)
    # u = (m + 1/2) / 2^24 is exact in float32 below one half; above, 1 - u is.
    unit = 2.0**-24
    low = ((m.float() + 0.5) * unit).log()
    high = torch.log1p(-((((1 << 24) - 1 - m).float() + 0.5) * unit))
    return -torch.log(-torch.where(m >= 1 << 23, high, low))


def _shift(z: Tensor, count: int) -> Tensor:
    """Logical (zero-filling) right shift of int64."""
    return (z >> count) & ((1 << (64 - count)) - 1)


def perturbed(logits: Tensor, keys: Tensor, temperature: Tensor) -> Tensor:
    """logits float32 [R, V] / T + noise; where temperature T [R] is 0 the logits themselves."""
    t = temperature[:, None]
    noise = torch.where(t > 0, gumbel_noise(keys, logits.shape[1]), 0.0)
    return logits / torch.where(t > 0, t, 1.0) + noise
