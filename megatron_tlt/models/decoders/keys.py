"""The random numbers of a rollout as a function of seed, prompt, sample and position only (numpy only).

The token at output position `t` of sample `i` of prompt `p` under seed `s` draws its noise from the row key

    k = mix(mix(mix(mix(s + C) ^ p * P1) ^ i * P2) ^ t * P3)            (64-bit, wrapping)

with `mix` the finaliser of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"). The
first three rounds do not depend on `t` and are done once a request (`request_key`). The noise of a token is in
`keyed_noise.py`; the same in C is `native/csrc/noise.h`.
"""

from __future__ import annotations

import numpy as np

MIX_A = 0xBF58476D1CE4E5B9
MIX_B = 0x94D049BB133111EB
TOKEN_STEP = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: token ids stay apart before mixing
_SEED_OFFSET = 0x8CB92BA72F3D8DD7
_FACTORS = np.array([0xD6E8FEB86659FD93, 0xA0761D6478BD642F, 0xE7037ED1A0B428DB], np.uint64)  # P1, P2, P3
_MASK = (1 << 64) - 1


def mix(z: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser of uint64 [...]."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_A)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_B)
    return z ^ (z >> np.uint64(31))


def request_key(seed: int, prompt_id: int, sample_index: int) -> int:
    """The part of a row key that all positions of one response share. Negative numbers wrap."""
    offset, prompt, sample = (
        np.array([value & _MASK], np.uint64) for value in (seed + _SEED_OFFSET, prompt_id, sample_index)
    )
    return int(mix(mix(mix(offset) ^ prompt * _FACTORS[0]) ^ sample * _FACTORS[1])[0])


def row_keys(request_keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Row keys of many rows: uint64 [R] from request keys uint64 [R] and output positions int [R]."""
    return mix(positions.astype(np.uint64) * _FACTORS[2] ^ request_keys)
