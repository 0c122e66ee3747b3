"""Which drafted tokens are fed to the policy, given how likely each is to be emitted. Numpy only.

A node's cumulative acceptance is the estimated probability that it and all its ancestors match, so it never grows from
parent to child; and parents stand before their children. Hence the first m nodes of a stable sort by cumulative
acceptance are closed under ancestors, and no other m nodes promise more tokens.

Legend: B rows (requests), N drafted nodes.
"""

from __future__ import annotations

import numpy as np


def best_of_all(cumulative_acceptance: np.ndarray, costs: np.ndarray, rate: float) -> np.ndarray:
    """Mask bool [N] of the nodes worth their rows: global greedy admission (DSpark, Algorithm 1).

    `cumulative_acceptance` float32 [N]; `costs` float64 [at least N + 1], seconds of a step with 0, 1, .. nodes; `rate`
    in tokens per second. Chosen is the m that maximises  sum of the m largest cumulative acceptances - rate * costs[m],
    the least on ties. DSpark maximises the ratio of tokens to seconds within the step instead. Over many steps that is
    not the highest throughput: a step that has little to hope for should end soon. With `rate` the throughput achieved
    so far, this is Dinkelbach's iteration for the ratio of the totals. What the draft cost is spent either way.
    """
    order = (-cumulative_acceptance).argsort(kind="stable")
    worth = np.empty(len(order) + 1)
    worth[0] = 0.0
    np.cumsum(cumulative_acceptance[order], out=worth[1:])
    worth -= rate * costs[: len(worth)]
    best = int(worth.argmax())
    keep = np.zeros(len(order), bool)
    keep[order[:best]] = True
    return keep


def best_of_chain(cumulative_acceptance: list[float], costs: list[float], rate: float) -> int:
    """`best_of_all` for a single chain: how many of its tokens to feed. Plain Python: a few tokens only."""
    best, worth, top = 0, 0.0, 0.0
    first = costs[0]
    for length, value in enumerate(cumulative_acceptance, 1):
        worth += value
        gain = worth - rate * (costs[length] - first)
        if gain > top:
            top, best = gain, length
    return best


def best_of_each(cumulative_acceptance: np.ndarray, counts: np.ndarray, most: int) -> np.ndarray:
    """Mask bool [N] of the `most` likeliest nodes of each row; all of them where a row has fewer.

    `counts` int32 [B] are the rows' nodes, flat in row order.
    """
    if len(counts) == 0 or int(counts.max()) <= most:
        return np.ones(len(cumulative_acceptance), bool)
    row_of = np.arange(len(counts)).repeat(counts)
    order = np.lexsort(
        (-cumulative_acceptance, row_of)
    )  # stable: rows stay in place, parents before children
    rank = np.arange(len(order)) - (np.cumsum(counts) - counts).repeat(counts)
    keep = np.zeros(len(order), bool)
    keep[order[rank < most]] = True
    return keep
