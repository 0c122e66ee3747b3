"""The drafters' noise is the sampler's, bit for bit."""

from __future__ import annotations

import numpy as np
import torch

from megatron_tlt.models import keyed_noise
from megatron_tlt.rollout import keys, sampler


def test_row_keys_are_the_samplers() -> None:
    requests = np.array(
        [keys.request_key(s, p, i) for s, p, i in ((0, 0, 0), (17, 5, 3), (-1, 9, 1))], np.uint64
    )
    positions = np.array([0, 7, 40000], np.int32)
    assert np.array_equal(keyed_noise.row_keys(requests, positions), keys.row_keys(requests, positions))
    assert int(keyed_noise.row_keys(requests, positions)[1]) == keys.row_key(17, 5, 3, 7)


def test_noise_is_the_samplers() -> None:
    row = np.random.default_rng(0).integers(0, 1 << 64, 200, dtype=np.uint64)
    mine = keyed_noise.gumbel_noise(keyed_noise.key_tensor(row), 1000)
    theirs = sampler.gumbel_noise(torch.from_numpy(row.view(np.int64)), 1000)
    assert torch.equal(mine, theirs)
    assert mine.isfinite().all()
