"""Row keys, one at a time."""

import numpy as np

from megatron_tlt.models.decoders.keys import request_key, row_keys


def row_key(seed: int, prompt_id: int, sample_index: int, position: int) -> int:
    """The key of one output position (0-based)."""
    keys = np.array([request_key(seed, prompt_id, sample_index)], np.uint64)
    return int(row_keys(keys, np.array([position]))[0])
