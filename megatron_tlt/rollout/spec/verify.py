"""Which drafted tokens are emitted: coupled verification, and what all verifiers share. Numpy only.

The engine feeds, row by row, the root (a request's last token) and then its drafted nodes: row r's block of fed rows
begins at `r + sum(counts[:r])`. The logits of a fed row are those of the token that follows it.

Coupled verification (Daliri et al., 2408.07978, section 3, with the keyed noise of `rollout.sampler`): the policy's
keyed token is drawn at every fed row, and drafted tokens only decide which of those rows are real. What is emitted is
the sequence of plain decoding whatever was drafted, how long the draft was and why.

Legend: B rows (requests), N drafted nodes, T = B + N fed rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_tlt.rollout.spec.draft import Draft


@dataclass(slots=True)
class Accepted:
    """The verdict on a draft. Every row emits its accepted tokens and one more, the bonus."""

    counts: np.ndarray  # int32 [B], tokens that each row emits: accepted + 1
    index: np.ndarray  # int32 [sum(counts)], fed rows whose next token is emitted, in order (a root first)
    accepted: np.ndarray  # bool [N], the node's token was emitted
    reached: np.ndarray  # bool [N], the node's parent was emitted: the node was put to the test


@dataclass(slots=True)
class Layout:
    """Where a draft's nodes are among the fed rows."""

    starts: np.ndarray  # int64 [B], the roots' fed rows
    nodes: np.ndarray  # int64 [N], the nodes' fed rows
    parents: np.ndarray  # int64 [N], the fed rows of their parents

    @classmethod
    def of(cls, draft: Draft) -> Layout:
        """The layout of `draft`."""
        counts = draft.counts
        each_row = np.arange(len(counts))
        row_of = each_row.repeat(counts)
        starts = np.cumsum(counts, dtype=np.int64)
        starts -= counts
        starts += each_row
        before = row_of + np.arange(len(row_of))  # one root for every row up to this one, itself not included
        parents = before if draft.parents is None else starts[row_of] + draft.parents + 1
        return cls(starts, before + 1, parents)

    def accepted(self, emitted: np.ndarray) -> Accepted:
        """The verdict from bool [T]: the root, or node, is emitted. Ancestors of an emitted node are, too."""
        counts = np.add.reduceat(emitted, self.starts, dtype=np.int32)
        index = emitted.nonzero()[0].astype(np.int32)  # parents precede children: this is the path's order
        return Accepted(counts, index, emitted[self.nodes], emitted[self.parents])


def follow(sampled: np.ndarray, draft: Draft) -> Accepted:
    """Coupled verification: a node is emitted if its parent is and the token drawn there equals the node's.

    `sampled` int32 [T] is the policy's keyed token of every fed row; `sampled[result.index]` is emitted. Siblings hold
    distinct tokens (of equal ones, the first counts).
    """
    if len(draft.counts) == 1:
        return _follow_one(sampled, draft)
    layout = Layout.of(draft)
    matched = sampled[layout.parents] == draft.tokens
    if draft.parents is None:
        return layout.accepted(_walk_chains(layout, matched, draft.counts, len(sampled)))
    return layout.accepted(_walk_trees(layout, matched, len(sampled)))


def _walk_chains(layout: Layout, matched: np.ndarray, counts: np.ndarray, total: int) -> np.ndarray:
    """Bool [T]: rows before the first mismatch of their chain, the root always."""
    missed = np.zeros(total, np.int32)
    missed[layout.nodes] = ~matched
    np.cumsum(missed, out=missed)
    # Roots miss nothing, so a root's sum is that of all chains before its own.
    emitted: np.ndarray = missed == missed[layout.starts].repeat(counts + 1)
    return emitted


def _walk_trees(layout: Layout, matched: np.ndarray, total: int) -> np.ndarray:
    """Bool [T]: rows on the path of matching children from their root; one vectorized turn a depth."""
    follows = np.full(total, -1)  # the matching child
    at = matched.nonzero()[0][::-1]  # the first of equal siblings is written last
    follows[layout.parents[at]] = layout.nodes[at]
    emitted = np.zeros(total, bool)
    path = layout.starts
    while len(path):
        emitted[path] = True
        path = follows[path]
        path = path[path >= 0]
    return emitted


def _follow_one(sampled: np.ndarray, draft: Draft) -> Accepted:
    """`follow` of one row: plain Python is faster than arrays of a few elements."""
    tokens, drawn = draft.tokens.tolist(), sampled.tolist()
    count = len(tokens)
    parents = range(-1, count - 1) if draft.parents is None else draft.parents.tolist()
    emitted = [True] + [False] * count
    index, last = [0], -1  # the emitted path and its last node
    for node, parent in enumerate(parents):
        if parent == last and tokens[node] == drawn[parent + 1]:
            emitted[node + 1] = True
            index.append(node + 1)
            last = node
    is_emitted = np.array(emitted)
    return Accepted(
        np.array([len(index)], np.int32),
        np.array(index, np.int32),
        is_emitted[1:],
        is_emitted[:-1] if draft.parents is None else is_emitted[draft.parents + 1],
    )
