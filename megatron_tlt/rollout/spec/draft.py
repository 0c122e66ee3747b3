"""What a drafter proposes: a small tree of tokens for each running request. Numpy only.

Legend: B running rows, N drafted nodes of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_tlt.types import DraftStrategy

SUFFIX, TRAINED = 0, 1  # of `Draft.source`


@dataclass(slots=True)
class Draft:
    """Drafted tokens of B rows, flat in row order; the root of each row (its last token) is not among them.

    Within a row parents precede children and the trunk (first child of first child ...) comes first.
    `cumulative_acceptance[i]` estimates the probability that the policy emits node i (it and all its ancestors match),
    so it never grows from parent to child.
    """

    counts: np.ndarray  # int32 [B], nodes of each row
    tokens: np.ndarray  # int32 [N]
    cumulative_acceptance: np.ndarray  # float32 [N]
    depths: np.ndarray  # int32 [N], 1 for a child of the root
    parents: np.ndarray | None = None  # int32 [N], index within the row's nodes or -1 (root); None: chains
    feature: np.ndarray | None = None  # int32 [N], cell of the drafter's calibration table
    source: np.ndarray | None = None  # int8 [B], index of the drafter that made the row (mixed)
    # float64 [B], tokens that the suffix draft was expected to bring to a row that another drafter drafted for (mixed)
    passed_over: np.ndarray | None = None

    @property
    def num_nodes(self) -> int:
        """N."""
        return len(self.tokens)

    @property
    def row_of(self) -> np.ndarray:
        """The row of each node, int64 [N]."""
        return np.arange(len(self.counts)).repeat(self.counts)

    @property
    def is_trunk(self) -> np.ndarray:
        """Bool [N]: nodes of the trunk, which stand first in their row at index depth - 1."""
        if self.parents is None:
            return np.ones(self.num_nodes, bool)
        starts = np.cumsum(self.counts) - self.counts
        within = np.arange(self.num_nodes) - np.repeat(starts, self.counts)
        trunk: np.ndarray = within == self.depths - 1
        return trunk

    @classmethod
    def empty(cls, rows: int) -> Draft:
        """No node for any row."""
        none = np.empty(0, np.int32)
        return cls(np.zeros(rows, np.int32), none, np.empty(0, np.float32), none)

    def select(self, keep: np.ndarray) -> Draft:
        """The nodes where `keep` (bool [N]) holds. The kept set must hold each kept node's ancestors."""
        if keep.all():
            return self
        row_of = self.row_of
        counts = np.bincount(row_of[keep], minlength=len(self.counts)).astype(np.int32)
        parents = None
        if self.parents is not None:
            starts = np.cumsum(self.counts) - self.counts
            rank = np.cumsum(keep) - 1  # flat index after the selection
            first = np.cumsum(counts) - counts
            flat_parent = np.where(self.parents < 0, 0, starts[row_of] + self.parents)
            moved = rank[flat_parent] - first[row_of]
            parents = np.where(self.parents < 0, -1, moved)[keep].astype(np.int32)
        return Draft(
            counts,
            self.tokens[keep],
            self.cumulative_acceptance[keep],
            self.depths[keep],
            parents,
            None if self.feature is None else self.feature[keep],
            self.source,
            self.passed_over,
        )


def prune(strategy: DraftStrategy, cumulative_acceptance: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Mask bool [N] of the drafted nodes that are fed to the policy: closed under ancestors.

    Nodes whose cumulative acceptance (float32 [N], never growing from parent to child, parents first) is at least the
    strategy's, and of each request's (`counts` int32 [B]) the `num_verify_tokens - 1` likeliest at most. With costs
    linear in rows and the price of a row as least cumulative acceptance, no other nodes are worth more less their price
    (the greedy choice of DSpark, Algorithm 1).
    """
    keep: np.ndarray = cumulative_acceptance >= strategy.min_cumulative_acceptance
    most = strategy.num_verify_tokens - 1
    if most < 0 or len(counts) == 0 or int(counts.max()) <= most:
        return keep
    row_of = np.arange(len(counts)).repeat(counts)
    order = np.lexsort(
        (-cumulative_acceptance, row_of)
    )  # stable: rows stay in place, parents before children
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order)) - (np.cumsum(counts) - counts).repeat(counts)
    return keep & (rank < most)
