"""Recursive rejection sampling of draft trees without replacement (SpecInfer, 2305.09781, section 4.3; Sequoia).

The children of a node are candidates x_1 .. x_k, drawn one after the other from Q without replacement (the k largest
of log Q + Gumbel noise, best first, are such a draw). With P_1 = P and Q_1 = Q, candidate j is accepted with
probability

    min(1, P_j(x_j) / Q_j(x_j));   if rejected, P_{j+1} ~ max(P_j - Q_j, 0) and Q_{j+1} ~ Q_j without x_j

and if none is, the token is drawn from P_{k+1}. Down a tree, the accepted child's children come next. Candidates
without Q (suffix drafts) are certain: Q_j is one at x_j. Which candidates there are, and which nodes have children,
must not depend on what is drawn at the nodes left out.

Legend: k candidates, N nodes of one row's tree, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class RecursiveRule:
    """What happens at one node with k children."""

    accept: (
        np.ndarray
    )  # float64 [k], probability that candidate j is accepted once all before it were rejected
    rest: np.ndarray  # float64 [V], distribution of the token if none is (normalized)


def recursive_rule(policy: np.ndarray, drafter: np.ndarray | None, candidates: np.ndarray) -> RecursiveRule:
    """The rule for distinct `candidates` int [k] in the order drawn.

    `policy` and `drafter` float64 [V] have sum 1 (`drafter` None: certain candidates). Raises AssertionError if a
    candidate cannot have been drawn from `drafter`.
    """
    p = policy
    q = None if drafter is None else drafter.copy()
    accept = np.empty(len(candidates))
    for j, token in enumerate(candidates.tolist()):
        under_drafter = 1.0 if q is None else q[token]
        assert under_drafter > 0, "a drafted token has probability 0 in the draft's own distribution"
        accept[j] = min(1.0, p[token] / under_drafter)
        if q is None:
            rest = p.copy()
            rest[token] = 0.0
        else:
            rest = np.maximum(p - q, 0.0)
            q[token] = 0.0
            if (left := q.sum()) > 0:
                q /= left
        # Nothing is left only where P = Q to rounding: then P itself is the answer to rounding.
        p = rest / total if (total := rest.sum()) > 0 else p
    return RecursiveRule(accept, p)


def recursive_reject(
    policy: np.ndarray, drafter: np.ndarray | None, candidates: np.ndarray, uniforms: np.ndarray
) -> tuple[int | None, np.ndarray]:
    """The index of the accepted candidate or None, and the distribution [V] to draw from if None.

    As `recursive_rule`; `uniforms` float [k] in [0, 1). The comparison is strict: probability 0 is never accepted.
    """
    rule = recursive_rule(policy, drafter, candidates)
    accepted = np.flatnonzero(uniforms < rule.accept)
    return (int(accepted[0]) if len(accepted) else None), rule.rest


def walk_tree(
    policy: np.ndarray,
    drafter: np.ndarray | None,
    tokens: np.ndarray,
    parents: np.ndarray,
    uniforms: np.ndarray,
) -> tuple[list[int], np.ndarray | None]:
    """The accepted path of one tree, as node indices, and the distribution [V] of the token after it.

    No distribution after a leaf: there the token comes from the policy itself, `policy[path[-1] + 1]`.

    `policy` float64 [N + 1, V] (root first), `drafter` float64 [N, V], what each node was drawn from before any
    sibling was taken out (or None), `tokens` int [N], `parents` int [N] (-1: the root), siblings in the order drawn,
    `uniforms` float [N] in [0, 1).
    """
    path: list[int] = []
    at = -1
    while True:
        children = np.flatnonzero(parents == at)
        if not len(children):
            return path, None
        child_drafter = None if drafter is None else drafter[children[0]]
        accepted, rest = recursive_reject(policy[at + 1], child_drafter, tokens[children], uniforms[children])
        if accepted is None:
            return path, rest
        at = int(children[accepted])
        path.append(at)
