"""Keyed sampling: the token is a function of the logits and of (seed, prompt, sample, position), nothing else.

    token = argmax(logits / T + G),   G = -log(-log u),   u = (m + 1/2) / 2^24,   m = z >> 40,
    z = mix(row_key + (token_id + 1) * 0x9E3779B97F4A7C15)

which draws exactly from softmax(logits / T) (the Gumbel-max trick: Maddison, Tarlow, Minka 2014, section 2).
Ties go to the lowest id; T = 0 is the plain arg max. The reported log-probability is
log_softmax(logits / (T or 1))[token], before top-k, top-p and min-p.

Legend: R rows, V vocabulary, D decoding rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.rollout.keys import MIX_A, MIX_B, TOKEN_STEP
from megatron_tlt.rollout.masks import apply_masks

NEAR_TIE = 1e-5
_ELEMENTS_AT_ONCE = 1 << 23  # of [rows, V]: bounds the temporaries of the torch path


def _signed(value: int) -> int:
    """The int64 with the bits of a uint64: torch multiplies and shifts int64 only."""
    return value - (1 << 64) if value >> 63 else value


_A, _B, _STEP = _signed(MIX_A), _signed(MIX_B), _signed(TOKEN_STEP)


class NativeSample(Protocol):
    """The C sampler of `models/native.py`: CPU, fp32 logits, no masks."""

    def __call__(
        self, logits: Tensor, temperature: Tensor, seed_keys: Tensor, out_token: Tensor, out_logprob: Tensor
    ) -> object:
        """Writes `out_token` int32 [R] and `out_logprob` float32 [R]."""


@dataclass(slots=True)
class SamplingRows:
    """How each of R rows is sampled (numpy)."""

    keys: np.ndarray  # uint64 [R], row keys
    temperature: np.ndarray  # float32 [R], 0: greedy
    top_k: np.ndarray  # int32 [R], 0: off
    top_p: np.ndarray  # float64 [R], 1: off
    min_p: np.ndarray  # float32 [R], 0: off
    is_masked: bool  # whether any row has a mask on


class Sampler:
    """Samples rows of logits on `device`. Counts near-ties if asked: rounding may decide those."""

    def __init__(self, device: torch.device, native: NativeSample | None = None, count_near_ties: bool = False):
        self.device = device
        self.near_ties = 0
        self._native = native if device.type == "cpu" else None
        self._count = count_near_ties

    def sample(self, logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        """Tokens int32 [R] and log-probabilities float32 [R] of `logits` float32 [R, V], on its device."""
        if self._native is not None and not self._count and not rows.is_masked:
            return self._sample_native(logits, torch.from_numpy(rows.temperature), torch.from_numpy(rows.keys))
        temperature = torch.from_numpy(rows.temperature).to(self.device)
        keys = torch.from_numpy(rows.keys.view(np.int64)).to(self.device)
        count = logits.shape[0]
        step = max(1, _ELEMENTS_AT_ONCE // logits.shape[1])
        parts = [
            self._sample_part(logits[i : i + step], temperature[i : i + step], keys[i : i + step], rows, i)
            for i in range(0, count, step)
        ]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def _sample_native(self, logits: Tensor, temperature: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        assert self._native is not None
        count = logits.shape[0]
        token, logprob = torch.empty(count, dtype=torch.int32), torch.empty(count, dtype=torch.float32)
        self._native(logits, temperature, keys, token, logprob)
        return token, logprob

    def _sample_part(
        self, logits: Tensor, temperature: Tensor, keys: Tensor, rows: SamplingRows, first: int
    ) -> tuple[Tensor, Tensor]:
        greedy = (temperature <= 0).unsqueeze(1)
        scores = logits.float() / torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
        allowed = scores
        if rows.is_masked:
            allowed = self._mask(scores, rows, first)
        if self._native is not None and not self._count:
            ones = torch.where(temperature > 0, 1.0, 0.0)
            token = self._sample_native(allowed, ones, keys.view(torch.uint64))[0].long()
        else:
            token = self._pick(torch.where(greedy, allowed, allowed + gumbel_noise(keys, scores.shape[1])))
        logprob = scores.gather(1, token.unsqueeze(1)).squeeze(1) - scores.logsumexp(dim=-1)
        return token.to(torch.int32), logprob

    def _mask(self, scores: Tensor, rows: SamplingRows, first: int) -> Tensor:
        part = slice(first, first + scores.shape[0])
        wanted = rows.temperature[part] > 0
        masked = wanted & ((rows.top_k[part] > 0) | (rows.top_p[part] < 1) | (rows.min_p[part] > 0))
        at = np.flatnonzero(masked)
        if not len(at):
            return scores
        top_k, top_p, min_p = (
            torch.from_numpy(array[part][at]).to(self.device) for array in (rows.top_k, rows.top_p, rows.min_p)
        )
        index = torch.from_numpy(at).to(self.device)
        return scores.index_copy(0, index, apply_masks(scores[index], top_k, top_p, min_p))

    def _pick(self, perturbed: Tensor) -> Tensor:
        """Arg max [R] of [R, V], lowest id first."""
        if self._count:
            best = perturbed.topk(min(2, perturbed.shape[1]), dim=-1).values
            self.near_ties += int((best[:, 0] - best[:, -1] <= NEAR_TIE).sum()) if best.shape[1] > 1 else 0
        return perturbed.argmax(dim=-1)


def gumbel_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """Noise float32 [R, V] of row keys int64 [R] (the bits of a uint64), on the keys' device."""
    ids = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=keys.device) * _STEP
    z = keys.unsqueeze(1) + ids
    z = (z ^ _shift(z, 30)) * _A
    z = (z ^ _shift(z, 27)) * _B
    z = z ^ _shift(z, 31)
    bits = _shift(z, 40)
    # m + 1/2 does not fit fp32 in the upper half: u would round to 1 and G to infinity once in 2^24 draws.
    # There 1 - u is exact instead.
    unit = 2.0**-24
    low = ((bits.float() + 0.5) * unit).log()
    high = torch.log1p(-((((1 << 24) - 1 - bits).float() + 0.5) * unit))
    return -torch.log(-torch.where(bits >= 1 << 23, high, low))


def _shift(z: Tensor, count: int) -> Tensor:
    """Logical (zero-filling) right shift of int64."""
    return (z >> count) & ((1 << (64 - count)) - 1)
