"""Keyed sampling in C against its definition in exact arithmetic (numpy float64), and against softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_tlt.models.decoders.keyed_noise import gumbel_noise
from megatron_tlt.models.decoders.keys import request_key, row_keys
from megatron_tlt.models.decoders.native.decoder import keyed_sample
from tests.helpers.mpi import run_one

U64 = np.uint64


def gumbel(keys: np.ndarray, vocab: int) -> np.ndarray:
    """The definition: [R] uint64 keys -> [R, V] float64 noise."""
    with np.errstate(over="ignore"):
        z = keys[:, None] + (np.arange(vocab, dtype=U64) + U64(1)) * U64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> U64(30))) * U64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> U64(27))) * U64(0x94D049BB133111EB)
        z ^= z >> U64(31)
    u = ((z >> U64(40)).astype(np.float64) + 0.5) * 2.0**-24
    return -np.log(-np.log(u))


def random_keys(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**64, n, dtype=U64)


def test_keys_of_positions_are_those_of_the_first_release() -> None:
    """A response's tokens depend on these numbers. Positions count all of its tokens, drawn or given."""
    keys = row_keys(np.array([request_key(7, 3, 1)], U64), np.arange(3))
    assert keys.tolist() == [0x23E8B06DE37D53AC, 0x47BD0F17724B3D86, 0xC1B8E305C25A5FA4]


def run(logits: np.ndarray, temperature: np.ndarray, keys: np.ndarray, threads: int = 1):
    rows, heat = (torch.from_numpy(a.astype(np.float32)) for a in (logits, temperature))
    token, logprob = keyed_sample(rows, heat, torch.from_numpy(keys), threads=threads)
    return token.numpy(), logprob.numpy()


@pytest.mark.parametrize("vocab", [1, 2, 17, 4096, 4097, 20000, 151936])
def test_tokens_and_logprobs_follow_the_definition(vocab: int) -> None:
    rows = 24
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((rows, vocab)) * 2).astype(np.float32)
    temperature = np.array([0.0, 0.3, 1.0, 1.7] * (rows // 4), np.float32)
    keys = random_keys(rows, vocab)
    t = np.where(temperature > 0, temperature, 1).astype(np.float64)[:, None]
    scaled = logits / t
    noisy = np.where(temperature[:, None] > 0, scaled + gumbel(keys, vocab), scaled)
    token, logprob = run(logits, temperature, keys)
    shifted = scaled - scaled.max(1, keepdims=True)
    want = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    best = noisy.max(1)
    chosen = np.take_along_axis(noisy, token[:, None].astype(int), 1)[:, 0]
    assert np.all(best - chosen <= 1e-5)  # equal but for ties that fp32 cannot see
    assert (token == noisy.argmax(1)).mean() > 0.95
    np.testing.assert_allclose(logprob, np.take_along_axis(want, token[:, None].astype(int), 1)[:, 0], atol=3e-6)


def test_noise_is_accurate_everywhere_even_at_the_ends_of_the_hash() -> None:
    """A token that wins by less and less: where it starts to win tells its noise. Hunts keys at both extremes."""
    keys = random_keys(2_000_000, 3)
    noise = gumbel(keys, 1)[:, 0]
    order = np.argsort(noise)
    picked = keys[np.concatenate([order[:300], order[-300:], order[:: len(order) // 400]])]
    both = gumbel(picked, 2)
    gap = both[:, 0] - both[:, 1]  # token 1 wins when its logit exceeds this
    tolerance = 4e-7 * np.maximum(1, np.abs(both).max(1) + np.abs(gap))
    for sign in (-1, 1):
        logits = np.stack([np.zeros_like(gap), gap + sign * tolerance], 1).astype(np.float32)
        exact = (logits[:, 1].astype(np.float64) > gap).astype(int)
        token, _ = run(logits, np.ones(len(gap)), picked)
        rounding = np.abs(logits[:, 1] - gap) < tolerance / 2  # the logit itself was rounded across
        assert np.all((token == exact) | rounding)


def unmix(z: int) -> int:
    """The inverse of `keys.mix`."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        out = z
        for _ in range(3):
            out = z ^ (out >> shift)
        z = out * pow(factor, -1, 2**64) % 2**64
    return z


@pytest.mark.parametrize("bits", [0, 2**64 - 1])
def test_noise_is_finite_at_both_ends_of_the_hash(bits: int) -> None:
    """Keys whose token 0 has m = 0 and m = 2^24 - 1, of which u rounds to 1 in fp32 and the noise would be infinite."""
    key = np.array([(unmix(bits) - 0x9E3779B97F4A7C15) % 2**64], U64)
    noise = gumbel(key, 2)[0]
    assert noise[0] == pytest.approx(17.3287 if bits else -2.8524, abs=1e-4)
    assert abs(float(gumbel_noise(torch.from_numpy(key.view(np.int64)), 1)) - noise[0]) < 1e-5
    for extra, winner in ((-0.001, 0), (0.001, 1)):
        logits = np.array([[0.0, noise[0] - noise[1] + extra]], np.float32)
        assert run(logits, np.ones(1), key)[0][0] == winner


def test_rows_are_independent_of_batch_and_threads() -> None:
    rng = np.random.default_rng(1)
    logits, keys = rng.standard_normal((33, 9001)).astype(np.float32), random_keys(33)
    temperature = rng.choice([0.0, 0.7, 1.0], 33)
    token, logprob = run(logits, temperature, keys, threads=2)
    for i in range(33):
        one = run(logits[i : i + 1], temperature[i : i + 1], keys[i : i + 1])
        assert one[0][0] == token[i] and one[1][0] == logprob[i]


MANY_ROWS = """
import faulthandler, torch
from megatron_tlt.models.decoders.native.decoder import keyed_sample
faulthandler.dump_traceback_later(60, exit=True)
rows = (1 << 20) + 3
logits = torch.zeros(1, 1).expand(rows, 1)
token, logprob = keyed_sample(logits, torch.ones(rows), torch.zeros(rows, dtype=torch.int64), threads=2)
assert not token.any() and not logprob.any()
"""


def test_more_rows_than_the_team_counts_in_a_stage() -> None:
    """2^20 units and more, in a process of their own, which ends should the team wait for ever."""
    run_one("-c", MANY_ROWS)


def test_masked_tokens_never_win_and_ties_go_to_the_lowest() -> None:
    logits = np.full((4, 6000), -np.inf, np.float32)
    logits[:, 5000] = 1.0
    logits[1, 4999] = 1.0
    token, logprob = run(logits, np.array([0, 0, 1, 1]), random_keys(4))
    assert token.tolist() == [5000, 4999, 5000, 5000]
    np.testing.assert_allclose(logprob, [0, -np.log(2), 0, 0], atol=1e-6)
    assert run(np.zeros((1, 9000), np.float32), np.zeros(1), random_keys(1))[0][0] == 0
