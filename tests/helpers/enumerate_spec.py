"""Exact enumeration of verifiers: every draft with its probability, every accept or reject branch, no random number.

A context is a number: the empty one is 0, and context c followed by token x is `c * V + 1 + x` (the nodes of a complete
V-ary tree, level by level). A model is a table float64 [contexts, V] of next-token distributions. Every verifier here
emits a prefix and then one token; the rest is the policy's own, so the joint distribution of a fixed number of tokens
must be the policy's.

Legend: V vocabulary, g drafted tokens, D drafts, K outcomes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations, product

import numpy as np
import torch

from megatron_tlt.rollout.spec.block import ChainDraft, accepted_lengths, block_rule, residuals
from megatron_tlt.rollout.spec.draft import Draft
from megatron_tlt.rollout.spec.recursive import recursive_rule, walk_tree
from megatron_tlt.rollout.spec.verify import follow

Lengths = Callable[[np.ndarray], np.ndarray]  # drafts int [D, g] to drafted tokens that are verified int [D]


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


@dataclass
class Outcomes:
    """What a verifier may emit: with `probability`, the prefix that is context `prefix`, then a token of `last`."""

    probability: np.ndarray  # float64 [K]
    length: np.ndarray  # int [K], tokens of the prefix
    prefix: np.ndarray  # int [K]
    last: np.ndarray  # float64 [K, V]

    @property
    def mean_accepted(self) -> float:
        """Expected accepted tokens."""
        return float(self.probability @ self.length)


def joint(outcomes: Outcomes, policy: np.ndarray, tokens: int) -> np.ndarray:
    """The distribution float64 [V ** tokens] of the first `tokens` tokens; the policy goes on where a verifier ends."""
    vocab = policy.shape[1]
    mass = np.zeros(first_of(tokens + 1, vocab))
    for token in range(vocab):
        reached = child(outcomes.prefix, np.int64(token), vocab)
        np.add.at(mass, reached, outcomes.probability * outcomes.last[:, token])
    return _finish(mass, policy, tokens)


def policy_joint(policy: np.ndarray, tokens: int) -> np.ndarray:
    """The policy's own distribution float64 [V ** tokens]."""
    mass = np.zeros(first_of(tokens + 1, policy.shape[1]))
    mass[0] = 1.0
    return _finish(mass, policy, tokens)


def _finish(mass: np.ndarray, policy: np.ndarray, tokens: int) -> np.ndarray:
    vocab = policy.shape[1]
    for level in range(tokens):
        here = np.arange(first_of(level, vocab), first_of(level + 1, vocab))
        below = child(here[:, None], np.arange(vocab), vocab)
        mass[below] += mass[here][:, None] * policy[here]
    return mass[first_of(tokens, vocab) :]


def error(outcomes: Outcomes, policy: np.ndarray, tokens: int) -> float:
    """Largest difference to the policy's distribution."""
    return float(np.abs(joint(outcomes, policy, tokens) - policy_joint(policy, tokens)).max())


# Block verification


def all_drafts(drafter: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Drafts int [D, g] that the drafter can make, and their probabilities float64 [D]."""
    vocab = drafter.shape[1]
    drafts = np.array(list(product(range(vocab), repeat=length)), np.int64).reshape(vocab**length, length)
    along = contexts_along(drafts, vocab)
    probability = np.prod(drafter[along[:, :-1], drafts], axis=1)
    return drafts[probability > 0], probability[probability > 0]


def chain_of(drafts: np.ndarray, counts: np.ndarray, policy: np.ndarray, drafter: np.ndarray | None):
    """The first `counts` int [D] tokens of drafts [D, g] as the production code takes them."""
    along = contexts_along(drafts, policy.shape[1])
    places = np.arange(drafts.shape[1])
    is_node, is_fed = places < counts[:, None], np.arange(drafts.shape[1] + 1) <= counts[:, None]
    nodes = int(counts.sum())
    draft = Draft(
        counts.astype(np.int32),
        drafts[is_node].astype(np.int32),
        np.ones(nodes, np.float32),
        np.broadcast_to(places + 1, is_node.shape)[is_node].astype(np.int32),
        probs=None if drafter is None else drafter[along[:, :-1][is_node]],
    )
    return ChainDraft.of(draft, torch.from_numpy(policy[along[is_fed]]))


def block_outcomes(
    policy: np.ndarray,
    drafter: np.ndarray | None,
    drafts: np.ndarray,
    probability: np.ndarray,
    lengths: Lengths | None = None,
    resume_from_policy: bool = False,
) -> Outcomes:
    """All that block verification may emit. Uniforms sit at the very border of each branch: strictness counts.

    `lengths` and `resume_from_policy` build the wrong ways.
    """
    vocab, count = policy.shape[1], len(drafts)
    counts = np.full(count, drafts.shape[1]) if lengths is None else lengths(drafts)
    chain = chain_of(drafts, counts, policy, drafter)
    rule, along = block_rule(chain), contexts_along(drafts, vocab)
    depth = np.arange(drafts.shape[1])
    accept = np.zeros(drafts.shape)  # h of tokens that are not verified: 0
    accept[depth < counts[:, None]] = rule.accept
    parts: list[Outcomes] = []
    for length in range(drafts.shape[1] + 1):
        branch = np.prod(1 - accept[:, length:], axis=1)
        if length:
            branch = branch * accept[:, length - 1]
        uniforms = accept.copy()  # u = h rejects
        uniforms[:, : max(0, length - 1)] = 0.5
        if length:
            uniforms[:, length - 1] = np.nextafter(accept[:, length - 1], 0)  # the largest u that accepts
        found = accepted_lengths(chain, rule, uniforms[depth < counts[:, None]])
        possible = branch > 0
        assert (found[possible] == length).all()
        last = policy[along[:, length]].copy()
        cut = np.flatnonzero(length < counts)
        if len(cut) and not resume_from_policy:
            rest = residuals(chain, rule, cut, np.full(count, length)).numpy()
            last[cut] = rest / rest.sum(-1, keepdims=True)
        parts.append(
            Outcomes(
                (probability * branch)[possible],
                np.full(count, length)[possible],
                along[possible, length],
                last[possible],
            )
        )
    return Outcomes(*(np.concatenate([getattr(p, n) for p in parts]) for n in Outcomes.__annotations__))


def token_rule_accepted(policy: np.ndarray, drafter: np.ndarray, length: int) -> float:
    """Expected accepted tokens of the token rule min(1, P / Q) (Leviathan et al., 2211.17192)."""
    drafts, probability = all_drafts(drafter, length)
    along = contexts_along(drafts, policy.shape[1])[:, :-1]
    each = np.minimum(1, policy[along, drafts] / drafter[along, drafts])
    return float(probability @ np.cumprod(each, axis=1).sum(1))


def longer_of_two(one: Outcomes) -> Outcomes:
    """The wrong way: two independent drafts, each verified, and the one that accepted more is kept."""
    first, second = (a.ravel() for a in np.meshgrid(*[np.arange(len(one.length))] * 2, indexing="ij"))
    kept = np.where(one.length[first] >= one.length[second], first, second)
    probability = one.probability[first] * one.probability[second]
    return Outcomes(probability, one.length[kept], one.prefix[kept], one.last[kept])


# Recursive rejection


@dataclass
class TreeCase:
    """One drafted tree, parents before children."""

    probability: float
    tokens: list[int]
    parents: list[int]
    contexts: list[int]  # after the root, then after each node

    def expanded(self, node: int, drafter: np.ndarray, children: int) -> list[TreeCase]:
        """This tree with `children` candidates below `node` (-1: the root), drawn without replacement: all ways."""
        vocab, context = drafter.shape[1], self.contexts[node + 1]
        q = drafter[context]
        children = min(children, int((q > 0).sum()))
        cases = []
        for drawn in permutations(range(vocab), children):
            probability, left = self.probability, 1.0
            for token in drawn:
                probability *= q[token] / left if q[token] > 0 else 0.0
                left -= q[token]
            if probability > 0:
                cases.append(
                    TreeCase(
                        probability,
                        [*self.tokens, *drawn],
                        [*self.parents, *[node] * children],
                        [*self.contexts, *(context * vocab + 1 + t for t in drawn)],
                    )
                )
        return cases


def all_trees(drafter: np.ndarray, shape: list[tuple[int, int]]) -> list[TreeCase]:
    """Trees by `shape`: (node, children) in order of expansion, -1 the root; nodes that do not exist are skipped."""
    cases = [TreeCase(1.0, [], [], [0])]
    for node, children in shape:
        cases = [
            new
            for case in cases
            for new in (case.expanded(node, drafter, children) if node < len(case.tokens) else [case])
        ]
    return cases


def tree_outcomes(policy: np.ndarray, drafter: np.ndarray | None, cases: list[TreeCase]) -> Outcomes:
    """All that recursive rejection may emit from the trees of `cases`."""
    found = [outcome for case in cases for outcome in _tree_branches(policy, drafter, case)]
    probability, length, prefix, last = zip(*found, strict=True)
    return Outcomes(np.array(probability), np.array(length), np.array(prefix), np.array(last))


def _tree_branches(policy: np.ndarray, drafter: np.ndarray | None, case: TreeCase):
    """(probability, length, context, distribution) of every branch; production code walks each of them."""
    tokens, parents = np.array(case.tokens, np.int32), np.array(case.parents, np.int32)
    contexts = np.array(case.contexts)
    p = policy[contexts]
    q = None if drafter is None else drafter[contexts[parents + 1]]
    waiting = [(case.probability, [], np.full(len(tokens), 0.5), -1)]
    while waiting:
        probability, path, uniforms, at = waiting.pop()
        children = np.flatnonzero(parents == at)
        if len(children):
            rule = recursive_rule(p[at + 1], None if q is None else q[children[0]], tokens[children])
            for i, node in enumerate(children.tolist()):
                uniforms = uniforms.copy()
                uniforms[node] = np.nextafter(rule.accept[i], 0)
                if rule.accept[i] > 0:
                    waiting.append((probability * rule.accept[i], [*path, node], uniforms.copy(), node))
                uniforms[node] = rule.accept[i]
                probability *= 1 - rule.accept[i]
        if probability > 0:
            walked, rest = walk_tree(p, q, tokens, parents, uniforms)
            assert walked == path
            yield probability, len(path), contexts[at + 1], p[at + 1] if rest is None else rest


# Coupled verification


def shared_noise(tables: list[np.ndarray], levels: int) -> tuple[np.ndarray, np.ndarray]:
    """Uniforms [K, levels], one a position, and probabilities [K]: all that inversion can tell apart.

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
    """One step of `follow` for rows of inversion noise [K, levels]: emitted tokens [K, g + 1] (-1: none) and counts."""
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
    verdict = follow(sampled, draft)
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


def g_test(tokens: np.ndarray, probability: np.ndarray) -> float:
    """p-value of the log-likelihood ratio test; 0 if something impossible was seen. `tokens` int, cells of [C]."""
    observed, allowed = np.bincount(tokens, minlength=len(probability)), probability > 0
    if observed[~allowed].any():
        return 0.0
    observed, expected = observed[allowed], probability[allowed] * len(tokens)
    assert expected.min() > 5, "too few draws for the test"
    seen = observed > 0
    g = 2 * np.sum(observed[seen] * np.log(observed[seen] / expected[seen]))
    half = torch.tensor([(len(observed) - 1) / 2, g / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
