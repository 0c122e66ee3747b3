"""Coupled verification: which drafted tokens are emitted (Daliri et al., 2408.07978, section 3).

The policy is fed, row by row, a request's last token and then its drafted tokens. At every fed token the policy's keyed
token is drawn (`rollout.sampler`), and drafted tokens only decide which of these draws are real: a drafted token is
emitted if all before it in its row are and it equals the token drawn at the one before it. The emitted tokens are
those of plain decoding for every draft.

Legend: B rows (requests), N drafted tokens, T = B + N fed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_tlt.models.decoders.draft import Draft


@dataclass(slots=True)
class Accepted:
    """The result of verification. Every row emits its accepted tokens and one more, the bonus token."""

    counts: np.ndarray  # int32 [B], tokens that each row emits: accepted + 1
    index: np.ndarray  # int32 [sum(counts)], fed tokens whose next token is emitted, in order
    accepted: np.ndarray  # bool [N], the drafted token was emitted
    reached: np.ndarray  # bool [N], all tokens before it in its row were emitted, so it was tested


def accept_matches(drawn: np.ndarray, draft: Draft) -> Accepted:
    """The accepted tokens by `drawn` int32 [T], the policy's keyed token behind every fed token."""
    row_of, at = draft.row_of, draft.positions
    matched = drawn[np.arange(draft.num_tokens) + row_of] == draft.tokens  # the token before, by its fed row
    length = draft.counts.copy()  # accepted tokens of each row: up to its first mismatch
    np.minimum.at(length, row_of[~matched], at[~matched].astype(np.int32))
    fed = draft.counts + 1
    offset = np.arange(len(drawn)) - np.repeat(np.cumsum(fed) - fed, fed)
    index = np.flatnonzero(offset <= np.repeat(length, fed)).astype(np.int32)
    return Accepted(length + np.int32(1), index, at < length[row_of], at <= length[row_of])
