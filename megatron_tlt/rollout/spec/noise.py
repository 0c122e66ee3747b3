"""Random streams of unkeyed verification, apart from the sampling noise and from each other. Numpy only.

Coupled verification needs none of this: drafter and policy share the noise of the row keys (`models.keys`). Block and
recursive verification are exact only if three things are independent: the drafted tokens, the acceptance uniforms
and the noise of the token drawn after the accepted ones. The last is the plain noise of its output position, used
once because a position is filled once. The other two are new in every STEP, not only at every position: a block's
verdict depends on all its drafted tokens and uniforms, also on those behind the accepted ones, so what the verdict has
already seen must not come back when the next step drafts the same positions again. A step is named by the row key of
the first token that it will emit, which is never that of another step:

    k = row_key(request, t)                            t: output position of the step's first token
    draft stream      mix(k ^ DRAFT_STREAM)            stands for the request key in the drafter
    acceptance stream mix(k ^ ACCEPT_STREAM)           node i: mix(stream ^ i * P3), 52 bits of it

Legend: B rows (requests), N drafted nodes.
"""

from __future__ import annotations

import numpy as np

from megatron_tlt.models.keys import row_keys

# Digits of the square roots of 2 and 3: any two constants that differ in many bits would do.
DRAFT_STREAM = np.uint64(0x6A09E667F3BCC908)
ACCEPT_STREAM = np.uint64(0xBB67AE8584CAA73B)
_U12 = np.uint64(12)


def draft_keys(request_keys: np.ndarray, output_positions: np.ndarray) -> np.ndarray:
    """What a drafter takes for request keys in this step when verification is unkeyed: uint64 [B].

    `request_keys` uint64 [B] (`keys.request_key`), `output_positions` int [B] of the first drafted token. The drafter
    derives row keys from the result as always, `row_keys(result, position)`, so it does not know the difference.
    """
    return _stream(row_keys(request_keys, output_positions), DRAFT_STREAM)


def accept_uniforms(root_keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Uniforms float64 [N], strictly between 0 and 1, flat in node order.

    `root_keys` uint64 [B] are the row keys of the roots (of the first token that each row will emit), `counts`
    int [B] the nodes of each row. A node's uniform depends on its row and its place in the row, not on `counts`.
    """
    starts = np.cumsum(counts) - counts
    place = np.arange(int(counts.sum())) - np.repeat(starts, counts)
    bits = row_keys(np.repeat(_stream(root_keys, ACCEPT_STREAM), counts), place) >> _U12
    # m + 1/2 with m < 2**52 is exact in float64: u never rounds to 0 or 1.
    uniforms: np.ndarray = (bits.astype(np.float64) + 0.5) * 2.0**-52
    return uniforms


def _stream(keys: np.ndarray, constant: np.uint64) -> np.ndarray:
    return row_keys(keys ^ constant, np.zeros(len(keys), np.int64))
