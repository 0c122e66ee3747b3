"""Keyed sampling draws from the softmax, masks are Hugging Face's, and C and torch agree.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from math import erfc, sqrt

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from megatron_tlt.models.decoders.keys import request_key, row_keys
from megatron_tlt.models.decoders.native.decoder import keyed_sample
from megatron_tlt.rollout.masks import apply_masks
from megatron_tlt.rollout.sampler import Sampler, SamplingRows
from tests.helpers.engines import CountingSampler

CPU = torch.device("cpu")
MASKS = [(0, 1.0, 0.0), (8, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.1), (12, 0.9, 0.05)]


def rows_of(keys: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0):
    n = len(keys)
    return SamplingRows(
        keys,
        np.full(n, temperature, np.float32),
        np.full(n, top_k, np.int32),
        np.full(n, top_p, np.float64),
        np.full(n, min_p, np.float32),
        is_masked=top_k > 0 or top_p < 1 or min_p > 0,
    )


def some_keys(count: int, seed: int = 0) -> np.ndarray:
    """Keys as an engine makes them: few requests, many positions."""
    requests = np.array([request_key(seed, p, s) for p in range(8) for s in range(8)], np.uint64)
    positions = np.repeat(np.arange(-(-count // 64)), 64)[:count]
    return row_keys(np.resize(requests, count), positions)


def warped(scores: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """transformers' own warpers, in the order in which `generate` applies them."""
    ids = torch.zeros(scores.shape[0], 1, dtype=torch.long)
    scores = TemperatureLogitsWarper(temperature)(ids, scores) if temperature != 1.0 else scores
    scores = TopKLogitsWarper(top_k)(ids, scores) if top_k else scores
    scores = TopPLogitsWarper(top_p)(ids, scores) if top_p < 1 else scores
    return MinPLogitsWarper(min_p)(ids, scores) if min_p else scores


def g_test(tokens: np.ndarray, probs: np.ndarray) -> float:
    """p-value of the log-likelihood ratio test (Wilson-Hilferty approximation of chi-squared)."""
    observed, allowed = np.bincount(tokens, minlength=len(probs)), probs > 0
    assert not observed[~allowed].any(), "a masked token was drawn"
    expected = probs[allowed] * len(tokens)
    observed, df = observed[allowed], int(allowed.sum()) - 1
    assert expected.min() > 5
    g = 2 * np.sum(observed[observed > 0] * np.log(observed[observed > 0] / expected[observed > 0]))
    z = ((g / df) ** (1 / 3) - (1 - 2 / (9 * df))) / sqrt(2 / (9 * df))
    return 0.5 * erfc(z / sqrt(2))


@pytest.mark.parametrize("masks", MASKS)
def test_frequencies_are_the_masked_softmax(masks: tuple[int, float, float]):
    """2^20 draws, a quarter of them under masks; a p-value is below 1e-4 once in 10,000 seeds (it is fixed)."""
    temperature, count = 0.8, 1 << (20 if masks == MASKS[0] else 18)
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(4)) * 1.5
    probs = warped(logits, temperature, *masks)[0].double().softmax(-1).numpy()
    sampler = Sampler(CPU, partial(keyed_sample, threads=2))
    keys = some_keys(count, 11)
    tokens = []
    for part in np.split(keys, 8):
        drawn, _ = sampler.sample(logits.expand(len(part), -1).contiguous(), rows_of(part, temperature, *masks))
        tokens.append(drawn)
    assert g_test(torch.cat(tokens).numpy(), probs) > 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("vocab", [7, 500, 5000])
def test_masks_are_those_of_transformers(vocab: int, temperature: float):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(16, vocab, generator=generator) * 3
    logits[8:] = (logits[8:] * 2).round() / 2  # many ties
    ours, theirs = [], []
    for top_k in (0, 1, 5, 10**6):
        for top_p in (1.0, 0.95, 0.5, 1e-6):
            for min_p in (0.0, 0.02, 1.0):
                scores = logits / temperature
                count = len(scores)
                ours.append(
                    apply_masks(
                        scores,
                        np.full(count, top_k, np.int32),
                        np.full(count, top_p, np.float64),
                        np.full(count, min_p, np.float32),
                    )
                )
                theirs.append(warped(logits, temperature, top_k, top_p, min_p))
    got, expected = torch.stack(ours), torch.stack(theirs)
    assert torch.equal(got[:, :8], expected[:, :8])
    # Which of several equal logits survive top-p is chance in transformers (an unstable sort).
    assert torch.equal(got[:, 8:].sort(-1).values, expected[:, 8:].sort(-1).values)


@pytest.mark.parametrize("masks", MASKS)
def test_native_equals_torch(masks: tuple[int, float, float]):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3000, 500, generator=generator) * 2
    rows = rows_of(some_keys(3000, 7), 0.9, *masks)
    rows.temperature[::5] = 0.0
    native, torch_only = Sampler(CPU, keyed_sample), CountingSampler(CPU)
    tokens, logprobs = native.sample(logits, rows)
    same, expected = torch_only.sample(logits, rows)
    assert int((tokens != same).sum()) <= torch_only.near_ties
    assert torch_only.near_ties < 10
    agree = tokens == same
    torch.testing.assert_close(logprobs[agree], expected[agree], atol=5e-6, rtol=0)
    scale = torch.where(torch.from_numpy(rows.temperature) > 0, torch.from_numpy(rows.temperature), 1.0)
    before_masks = (logits / scale[:, None]).double().log_softmax(-1).gather(1, tokens.long()[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), before_masks, atol=5e-6, rtol=0)
    greedy = torch.from_numpy(rows.temperature) == 0
    assert torch.equal(tokens[greedy].long(), logits[greedy].argmax(-1))
