"""Row keys of drafters are the engine's, bit for bit. (The noise itself: tests/numerics/test_sampling.py.)"""

from __future__ import annotations

import numpy as np

from megatron_tlt.models import keyed_noise
from megatron_tlt.rollout import keys


def test_row_keys_are_the_samplers() -> None:
    requests = np.array(
        [keys.request_key(s, p, i) for s, p, i in ((0, 0, 0), (17, 5, 3), (-1, 9, 1))], np.uint64
    )
    positions = np.array([0, 7, 40000], np.int32)
    assert np.array_equal(keyed_noise.row_keys(requests, positions), keys.row_keys(requests, positions))
    assert int(keyed_noise.row_keys(requests, positions)[1]) == keys.row_key(17, 5, 3, 7)
