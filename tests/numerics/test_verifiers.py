"""Coupled verification gives exactly the policy's distribution: enumerated where possible, not sampled.

Legend: V vocabulary, B rows, T fed rows.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_tlt.models.keys import request_key, row_keys
from megatron_tlt.rollout.sampler import gumbel_noise
from megatron_tlt.rollout.spec.draft import Draft
from megatron_tlt.rollout.spec.verify import accept_matches
from tests.helpers.enumerate_spec import (
    cells,
    continued,
    coupled_step,
    decode,
    policy_joint,
    random_table,
    shared_noise,
)

EXACT = 1e-12
V = 3
KINDS = [("dense", "dense"), ("zeros", "dense"), ("dense", "zeros"), ("zeros", "zeros")]
KINDS += [("onehot", "dense"), ("dense", "onehot"), ("onehot", "onehot")]


def tables(kinds: tuple[str, str], levels: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return random_table(rng, V, levels, kinds[0]), random_table(rng, V, levels, kinds[1])


# Enumerated


@pytest.mark.parametrize("kinds", KINDS)
def test_coupled_verification_is_exact(kinds: tuple[str, str]):
    policy, drafter = tables(kinds, 3, 30)
    uniforms, weights = shared_noise([policy, drafter], 3)
    drafts = decode(drafter, uniforms[:, :2])
    emitted, counts = coupled_step(policy, drafts, np.full(len(drafts), 2), uniforms)
    answer = continued(emitted, policy, uniforms)
    assert np.array_equal(answer, decode(policy, uniforms))
    found = np.bincount(cells(answer, V), weights, minlength=V**3)
    assert np.abs(found - policy_joint(policy, 3)).max() < EXACT
    assert kinds != ("dense", "dense") or set(counts.tolist()) == {1, 2, 3}


@pytest.mark.parametrize("cut", [True, False])
def test_choices_by_the_draft_or_by_the_verdict_change_nothing(cut: bool):
    """A length that depends on the drafted tokens, and the longer verdict of two drafts: both bias other rules."""
    policy, drafter = tables(("dense", "dense"), 3, 2)
    other = random_table(np.random.default_rng(77), V, 3)
    uniforms, weights = shared_noise([policy, drafter, other], 3)
    drafts = decode(drafter, uniforms[:, :2])
    full = np.full(len(drafts), 2)
    is_one = drafts == 1
    lengths = np.where(is_one.any(1), is_one.argmax(1), 2) if cut else full
    emitted, counts = coupled_step(policy, drafts, lengths, uniforms)
    if not cut:
        second, second_counts = coupled_step(policy, decode(other, uniforms[:, :2]), full, uniforms)
        assert (second_counts > counts).any() and (second_counts < counts).any()
        emitted = np.where((second_counts > counts)[:, None], second, emitted)
    answer = continued(emitted, policy, uniforms)
    assert np.array_equal(answer, decode(policy, uniforms))
    found = np.bincount(cells(answer, V), weights, minlength=V**3)
    assert np.abs(found - policy_joint(policy, 3)).max() < EXACT


def test_coupled_acceptance_is_as_promised():
    """P(match) = sum over x of 1 / sum over y of max(p_y / p_x, q_y / q_x) exactly, between (1-TV)/(1+TV) and 1-TV."""
    count = 400_000
    for seed in range(3):
        rng = np.random.default_rng(seed)
        p, q = rng.dirichlet(np.ones(8)), rng.dirichlet(np.ones(8) * 2)
        p = 0.7 * p + 0.3 * q
        requests = np.array([request_key(seed, prompt, 0) for prompt in range(1 << 10)], np.uint64)
        keys = row_keys(np.resize(requests, count), np.arange(count) // len(requests))
        noise = gumbel_noise(torch.from_numpy(keys.view(np.int64)), 8)
        drawn, drafted = ((torch.from_numpy(np.log(t)).float() + noise).argmax(-1).numpy() for t in (p, q))
        ones = np.ones(count, np.int32)
        sampled = np.zeros(2 * count, np.int32)
        sampled[::2] = drawn
        draft = Draft(ones, drafted.astype(np.int32), ones.astype(np.float32), ones)
        rate = float(accept_matches(sampled, draft).accepted.mean())
        tv = 0.5 * np.abs(p - q).sum()
        exact = sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(8))
        noise_of_rate = 5 * np.sqrt(exact * (1 - exact) / count)
        assert abs(rate - exact) < noise_of_rate
        assert (1 - tv) / (1 + tv) <= exact <= 1 - tv
        assert (1 - tv) / (1 + tv) - noise_of_rate < rate < 1 - tv + noise_of_rate
