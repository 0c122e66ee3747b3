"""How often a coupled draft is accepted. Equal responses whatever is drafted: tests/numerics/test_speculation.py."""

from __future__ import annotations

import numpy as np
import torch

from megatron_tlt.models.decoders.draft import Draft
from megatron_tlt.models.decoders.keyed_noise import gumbel_noise
from megatron_tlt.models.decoders.keys import request_key, row_keys
from megatron_tlt.rollout.speculation.verify import accept_matches


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
        draft = Draft(ones, drafted.astype(np.int32), ones.astype(np.float32))
        rate = float(accept_matches(sampled, draft).accepted.mean())
        tv = 0.5 * np.abs(p - q).sum()
        exact = sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(8))
        noise_of_rate = 5 * np.sqrt(exact * (1 - exact) / count)
        assert abs(rate - exact) < noise_of_rate
        assert (1 - tv) / (1 + tv) <= exact <= 1 - tv
        assert (1 - tv) / (1 + tv) - noise_of_rate < rate < 1 - tv + noise_of_rate
