"""Keyed sampling: a token is a function of the logits and of (seed, prompt, sample, position) only.

    token = argmax(logits / T + G),   G = -log(-log u),   u = (m + 1/2) / 2^24,   m = z >> 40,
    z = mix(row_key + (token_id + 1) * 0x9E3779B97F4A7C15)

which draws exactly from softmax(logits / T) (the Gumbel-max trick: Maddison, Tarlow, Minka 2014, section 2).
Ties go to the lowest id; T = 0 is the plain arg max. The reported log-probability is
log_softmax(logits / (T or 1))[token], before top-k, top-p and min-p.

Legend: R rows, V vocabulary, D decoding rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.config.planning.engine import SAMPLED_AT_ONCE
from megatron_tlt.models.decoders.keyed_noise import SampleKernel, gumbel_noise, key_tensor
from megatron_tlt.models.decoders.torch.transfer import upload
from megatron_tlt.rollout.masks import apply_masks

# The C sampler (CPU, fp32 logits, no masks): from logits, temperatures and keys of R rows tokens int32 [R] and
# log-probabilities float32 [R].
NativeSample = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(slots=True)
class SamplingRows:
    """Sampling parameters and keys of R rows (numpy)."""

    keys: np.ndarray  # uint64 [R], row keys
    temperature: np.ndarray  # float32 [R], 0: greedy
    top_k: np.ndarray  # int32 [R], 0: off
    top_p: np.ndarray  # float64 [R], 1: off
    min_p: np.ndarray  # float32 [R], 0: off
    is_masked: bool  # whether any row has a mask on

    @property
    def masked(self) -> np.ndarray:
        """Bool [R]: rows with a mask on. Greedy rows need none: the most likely token always survives."""
        masked: np.ndarray = (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)
        masked &= self.temperature > 0
        return masked

    def part(self, at: slice | np.ndarray) -> SamplingRows:
        """Some of the rows."""
        keys, temperature, top_k, top_p, min_p = (column[at] for column in self._columns())
        return SamplingRows(keys, temperature, top_k, top_p, min_p, self.is_masked)

    def apply_masks(self, scores: Tensor) -> Tensor:
        """`scores` [R, V] with the tokens outside each row's masks at -inf."""
        return apply_masks(scores, self.top_k, self.top_p, self.min_p)

    def join(self, other: SamplingRows) -> SamplingRows:
        """These rows, then the other ones."""
        pairs = zip(self._columns(), other._columns(), strict=True)
        keys, temperature, top_k, top_p, min_p = (np.concatenate(pair) for pair in pairs)
        return SamplingRows(keys, temperature, top_k, top_p, min_p, self.is_masked or other.is_masked)

    def _columns(self) -> tuple[np.ndarray, ...]:
        return self.keys, self.temperature, self.top_k, self.top_p, self.min_p


class Sampler:
    """Samples rows of logits on `device`."""

    def __init__(
        self,
        device: torch.device,
        native: NativeSample | None = None,
        kernel: SampleKernel | None = None,
    ):
        self.device = device
        self._native = native if device.type == "cpu" else None
        self._kernel = kernel  # draws on CUDA

    def sample(self, logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        """Tokens int32 [R] and log-probabilities float32 [R] of `logits` float32 [R, V], on its device.

        A row's result never depends on the other rows: each step below works row by row.
        """
        if self._native is not None:
            temperature, keys = torch.from_numpy(rows.temperature), torch.from_numpy(rows.keys)
            token, logprob = self._native(logits, temperature, keys)
            if rows.is_masked:
                self._resample_masked(self._native, logits, rows, token, logprob)
            return token, logprob
        if self._kernel is not None:
            packed = self.sample_packed(logits, rows)
            return packed[0], packed[1].view(torch.float32)
        step = max(1, SAMPLED_AT_ONCE // logits.shape[1])
        parts = [
            self._sample_part(logits[i : i + step], rows.part(slice(i, i + step)))
            for i in range(0, logits.shape[0], step)
        ]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def sample_packed(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """The result of `sample` as one tensor, int32 [2, R]: tokens, and the bits of their log-probabilities."""
        if self._kernel is not None:
            return self._kernel(logits, *_upload(rows, self.device), rows.is_masked)
        tokens, logprobs = self.sample(logits, rows)
        return torch.stack((tokens, logprobs.view(torch.int32)))

    @staticmethod
    def _resample_masked(
        native: NativeSample, logits: Tensor, rows: SamplingRows, token: Tensor, logprob: Tensor
    ) -> None:
        """Draws the rows with a mask again, among the tokens inside the mask. Mutates `token` and `logprob`."""
        at = np.flatnonzero(rows.masked)
        some = rows.part(at)
        index = torch.from_numpy(at)
        scores = logits[index] / torch.from_numpy(some.temperature).unsqueeze(1)
        drawn, _ = native(some.apply_masks(scores), torch.ones(len(at)), torch.from_numpy(some.keys))
        token[index] = drawn
        logprob[index] = scores.log_softmax(-1).gather(1, drawn.long().unsqueeze(1)).squeeze(1)

    def _sample_part(self, logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        temperature = torch.from_numpy(rows.temperature).to(self.device).unsqueeze(1)
        keys = key_tensor(rows.keys, self.device)
        scores = logits.float() / torch.where(temperature > 0, temperature, 1.0)
        allowed = scores
        at = np.flatnonzero(rows.masked)
        if len(at):
            index = torch.from_numpy(at).to(self.device)
            allowed = scores.index_copy(0, index, rows.part(at).apply_masks(scores[index]))
        perturbed = allowed + gumbel_noise(keys, scores.shape[1])
        token = torch.where(temperature > 0, perturbed, allowed).argmax(dim=-1)  # the lowest id of equals
        logprob = scores.log_softmax(-1).gather(1, token.unsqueeze(1)).squeeze(1)
        return token.to(torch.int32), logprob


def _upload(rows: SamplingRows, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Keys int64, temperature, top_k int32, 1 - top_p and min_p, each [R]: one copy to the device."""
    drop = (1 - rows.top_p).astype(np.float32)  # in double, rounded once, as in `masks.py`
    columns = rows.keys, rows.top_k, rows.temperature, drop, rows.min_p
    packed = upload(np.concatenate([column.view(np.int32) for column in columns]), device)
    count = drop.size
    keys, top_k, floats = packed.split_with_sizes([2 * count, count, 3 * count])
    temperature, dropped, least = floats.view(torch.float32).chunk(3)
    return keys.view(torch.int64), temperature, top_k, dropped, least
