"""Exact enumeration of coupled verification: every draft and every draw with its probability, no random number.

A context is a number: the empty one is 0, and context c followed by token x is `c * V + 1 + x` (the nodes of a complete
V-ary tree, level by level). A model is a table float64 [contexts, V] of next-token distributions.

Legend: V vocabulary, g drafted tokens, D drafts, K outcomes.
"""

from __future__ import annotations

import numpy as np

from megatron_tlt.rollout.spec.draft import Draft
from megatron_tlt.rollout.spec.verify import accept_matches


def first_of(level: int, vocab: int) -> int:
    """The first context of `level` tokens: also the number of shorter contexts."""
    return sum(vocab**d for d in range(level))


def child(context: np.ndarray, token: np.ndarray, vocab: int) -> np.ndarray:
    """The context one token further."""
    return context * vocab + 1 + token


def contexts_along(drafts: np.ndarray, vocab: int) -> np.ndarray:
    """Int [D, g + 1]: the context before each token of drafts [D, g], and after the last."""
    along = np.zeros((len(drafts), drafts.shape[1] + 1), np.int64)
    for i in range(drafts.shape[1]):
        along[:, i + 1] = child(along[:, i], drafts[:, i], vocab)
    return along


def random_table(rng: np.random.Generator, vocab: int, levels: int, kind: str = "dense") -> np.ndarray:
    """A table for contexts of fewer than `levels` tokens. `kind`: dense, zeros (one token impossible) or onehot."""
    table = rng.dirichlet(np.full(vocab, 0.7), first_of(levels, vocab))
    if kind == "zeros":
        table[np.arange(len(table)), rng.integers(0, vocab, len(table))] = 0.0
    if kind == "onehot":
        table = np.eye(vocab)[rng.integers(0, vocab, len(table))]
    return table / table.sum(-1, keepdims=True)


def policy_joint(policy: np.ndarray, tokens: int) -> np.ndarray:
    """The policy's own distribution float64 [V ** tokens]."""
    mass = np.zeros(first_of(tokens + 1, policy.shape[1]))
    mass[0] = 1.0
    vocab = policy.shape[1]
    for level in range(tokens):
        here = np.arange(first_of(level, vocab), first_of(level + 1, vocab))
        below = child(here[:, None], np.arange(vocab), vocab)
        mass[below] += mass[here][:, None] * policy[here]
    return mass[first_of(tokens, vocab) :]


def shared_noise(tables: list[np.ndarray], levels: int) -> tuple[np.ndarray, np.ndarray]:
    """Uniforms [K, levels], one a position, and probabilities [K]: all that inversion can distinguish.

    With these, sampling by inversion from any row of `tables` is enumerated exactly.
    """
    vocab = tables[0].shape[1]
    middles, widths = [], []
    for level in range(levels):
        here = slice(first_of(level, vocab), first_of(level + 1, vocab))
        borders = np.unique(
            np.concatenate([[0.0, 1.0], *(np.cumsum(t[here], 1)[:, :-1].ravel() for t in tables)])
        )
        middles.append((borders[1:] + borders[:-1]) / 2)
        widths.append(np.diff(borders))
    uniforms = np.stack([m.ravel() for m in np.meshgrid(*middles, indexing="ij")], 1)
    weights = np.prod(np.stack([w.ravel() for w in np.meshgrid(*widths, indexing="ij")], 1), axis=1)
    return uniforms, weights


def invert_rows(table: np.ndarray, contexts: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """The token int [K] at each uniform of each context's distribution."""
    return (np.cumsum(table[contexts], -1)[..., :-1] <= uniforms[..., None]).sum(-1)


def coupled_step(
    policy: np.ndarray, drafts: np.ndarray, counts: np.ndarray, uniforms: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """One step of `accept_matches` for rows of inversion noise [K, levels]: tokens [K, g + 1] (-1: none) and counts."""
    along = contexts_along(drafts, policy.shape[1])
    g = drafts.shape[1]
    is_node, is_fed = np.arange(g) < counts[:, None], np.arange(g + 1) <= counts[:, None]
    sampled = invert_rows(policy, along, uniforms[:, : g + 1])[is_fed].astype(np.int32)
    nodes = int(counts.sum())
    draft = Draft(
        counts.astype(np.int32),
        drafts[is_node].astype(np.int32),
        np.ones(nodes, np.float32),
        np.broadcast_to(np.arange(1, g + 1), is_node.shape)[is_node].astype(np.int32),
    )
    verdict = accept_matches(sampled, draft)
    emitted = np.full((len(drafts), g + 1), -1)
    emitted[np.arange(g + 1) < verdict.counts[:, None]] = sampled[verdict.index]
    return emitted, verdict.counts


def decode(table: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Plain decoding by inversion: tokens int [K, levels]."""
    context, tokens = np.zeros(len(uniforms), np.int64), []
    for level in range(uniforms.shape[1]):
        tokens.append(invert_rows(table, context, uniforms[:, level]))
        context = child(context, tokens[-1], table.shape[1])
    return np.stack(tokens, 1)


def continued(emitted: np.ndarray, policy: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Emitted tokens [K, levels] with the policy's own (same noise) where the step ended."""
    out, context = emitted.copy(), np.zeros(len(emitted), np.int64)
    for level in range(uniforms.shape[1]):
        own = invert_rows(policy, context, uniforms[:, level])
        out[:, level] = np.where(emitted[:, level] >= 0, emitted[:, level], own)
        context = child(context, out[:, level], policy.shape[1])
    return out


def cells(tokens: np.ndarray, vocab: int) -> np.ndarray:
    """The place of each row of tokens among all sequences of that length."""
    return tokens @ vocab ** np.arange(tokens.shape[1])[::-1]
