"""Coupled verification: which drafted tokens are emitted (Daliri et al., 2408.07978, section 3).

The policy is fed, row by row, the root (a request's last token) and then its drafted nodes. At every fed row its keyed
token is drawn (`rollout.sampler`), and drafted tokens only decide which of these draws are real: a node is emitted if
its parent is and the token drawn there equals the node's. What is emitted is the sequence of plain decoding whatever
was drafted, how long the draft was and why.

Legend: B rows (requests), N drafted nodes, T = B + N fed rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_tlt.rollout.spec.draft import Draft


@dataclass(slots=True)
class Accepted:
    """The verdict on a draft. Every row emits its accepted tokens and one more, the bonus token."""

    counts: np.ndarray  # int32 [B], tokens that each row emits: accepted + 1
    index: np.ndarray  # int32 [sum(counts)], fed rows whose next token is emitted, in order (a root first)
    accepted: np.ndarray  # bool [N], the node's token was emitted
    reached: np.ndarray  # bool [N], the node's parent was emitted: the node was put to the test


def accept_matches(drawn: np.ndarray, draft: Draft) -> Accepted:
    """The verdict from `drawn` int32 [T], the policy's keyed token of every fed row.

    Siblings hold distinct tokens (of equal ones, the first counts).
    """
    counts, row_of = draft.counts, draft.row_of
    starts = np.cumsum(counts + 1) - (counts + 1)  # fed rows of the roots
    nodes = np.arange(len(row_of)) + row_of + 1  # fed rows of the nodes
    parents = nodes - 1 if draft.parents is None else starts[row_of] + draft.parents + 1
    matched = (drawn[parents] == draft.tokens).nonzero()[0][
        ::-1
    ]  # the first of equal siblings is written last
    match_of = np.full(len(drawn), -1)  # the matching child of a fed row
    match_of[parents[matched]] = nodes[matched]
    emitted = np.zeros(len(drawn), bool)
    path = starts
    while len(path):  # one turn a depth, all rows at once
        emitted[path] = True
        path = match_of[path]
        path = path[path >= 0]
    index = emitted.nonzero()[0].astype(np.int32)  # parents precede children: this is the path's order
    return Accepted(np.add.reduceat(emitted, starts, dtype=np.int32), index, emitted[nodes], emitted[parents])
