"""The random numbers of a rollout as a function of what is sampled, never of when or where (numpy only).

The token at output position `t` of sample `i` of prompt `p` under seed `s` draws its noise from the row key

    k = mix(mix(mix(mix(s + C) ^ p * P1) ^ i * P2) ^ t * P3)            (64-bit, wrapping)

with `mix` the finaliser of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
generators"). The first three rounds do not depend on `t` and are done once a request (`request_key`).
"""

from __future__ import annotations

import numpy as np

_MASK = (1 << 64) - 1
MIX_A = 0xBF58476D1CE4E5B9
MIX_B = 0x94D049BB133111EB
TOKEN_STEP = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: token ids stay apart before mixing
_SEED_OFFSET = 0x8CB92BA72F3D8DD7
_PROMPT_FACTOR = 0xD6E8FEB86659FD93
_SAMPLE_FACTOR = 0xA0761D6478BD642F
_POSITION_FACTOR = 0xE7037ED1A0B428DB

_U30, _U27, _U31 = np.uint64(30), np.uint64(27), np.uint64(31)
_NP_A, _NP_B, _NP_POSITION = np.uint64(MIX_A), np.uint64(MIX_B), np.uint64(_POSITION_FACTOR)


def mix(z: int) -> int:
    """The splitmix64 finaliser of one 64-bit number."""
    z = ((z ^ (z >> 30)) * MIX_A) & _MASK
    z = ((z ^ (z >> 27)) * MIX_B) & _MASK
    return z ^ (z >> 31)


def request_key(seed: int, prompt_id: int, sample_index: int) -> int:
    """The part of a row key that all positions of one answer share. Negative numbers wrap."""
    key = mix((seed + _SEED_OFFSET) & _MASK)
    key = mix(key ^ (prompt_id * _PROMPT_FACTOR & _MASK))
    return mix(key ^ (sample_index * _SAMPLE_FACTOR & _MASK))


def row_key(seed: int, prompt_id: int, sample_index: int, position: int) -> int:
    """The key of one output position (0-based)."""
    return mix(request_key(seed, prompt_id, sample_index) ^ (position * _POSITION_FACTOR & _MASK))


def row_keys(request_keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Row keys of many rows: uint64 [R] from request keys uint64 [R] and output positions int [R]."""
    key = positions.astype(np.uint64)
    key *= _NP_POSITION
    key ^= request_keys
    key ^= key >> _U30
    key *= _NP_A
    key ^= key >> _U27
    key *= _NP_B
    key ^= key >> _U31
    return key
