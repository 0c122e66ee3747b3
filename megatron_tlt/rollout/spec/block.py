"""Block verification of drafted chains (Sun et al., 2403.10444, algorithm 2), on distributions.

With the policy's P, the drafter's Q, drafted tokens x_1 .. x_g and p_0 = 1:

    p_i = min(p_{i-1} P(x_i) / Q(x_i), 1)                       `weight`: both conditional on x_1 .. x_{i-1}
    Z_i = sum over x of max(p_i P(x) - Q(x), 0)                 both conditional on x_1 .. x_i
    h_i = Z_i / (Z_i + 1 - p_i) for i < g,  h_g = p_g           `accept`
    accepted length = the largest i with u_i < h_i, else 0;  then a token from max(p_i P - Q, 0), from P if i = g

The comparison is strict, so that h = 0 never accepts even where a uniform is 0. A suffix draft's Q is one at its token.

How many tokens are verified, and whose, must be decided before they are drawn: a length chosen by what was drawn
biases the answers here. It does not in coupled verification, and not where Q is one-hot: then the answer has the
policy's distribution given any draft, provided that the draft is independent of the noise that follows.

Legend: B rows (requests), N drafted nodes, T = B + N fed rows (see `verify`), V vocabulary, g drafted tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.rollout.spec.draft import Draft
from megatron_tlt.rollout.spec.verify import Layout


@dataclass(slots=True)
class ChainDraft:
    """Drafted chains and the distributions that verify them. Flat in row order, as fed."""

    counts: np.ndarray  # int [B], nodes of each row
    tokens: np.ndarray  # int [N]
    policy: Tensor  # float64 [T, V], P after every fed row, each row of sum 1
    drafter: Tensor | None  # float64 [N, V], Q of every node, each row of sum 1; None: one-hot at the tokens
    layout: Layout

    @classmethod
    def of(cls, draft: Draft, policy: Tensor) -> ChainDraft:
        """`draft` (chains, `probs` [N, V] or None for one-hot) under the policy's distributions [T, V]."""
        assert draft.parents is None, "block verification is for chains"
        return cls(draft.counts, draft.tokens, policy, drafter_distribution(draft, policy), Layout.of(draft))


@dataclass(slots=True)
class BlockRule:
    """How likely each length is accepted."""

    weight: np.ndarray  # float64 [T], p_i after each fed row (1 at roots)
    accept: np.ndarray  # float64 [N], h_i of each node


def drafter_distribution(draft: Draft, policy: Tensor) -> Tensor | None:
    """`draft.probs` as float64 [N, V] of sum 1 on the policy's device (fp32 sums are 1 only to rounding)."""
    if draft.probs is None:
        return None
    probs = torch.from_numpy(draft.probs).to(policy)
    return probs / probs.sum(-1, keepdim=True)


def block_rule(chain: ChainDraft) -> BlockRule:
    """p_i and h_i of all rows.

    Raises AssertionError if a drafted token has probability 0 under the distribution that it claims to be drawn from:
    such a draft (an arg max passed off as a sample, say) would bias the answers.
    """
    layout, tokens = chain.layout, torch.from_numpy(chain.tokens.astype(np.int64)).to(chain.policy.device)
    parents = torch.from_numpy(layout.parents).to(chain.policy.device)
    under_policy = chain.policy[parents, tokens].cpu().numpy()
    under_drafter = np.ones(len(under_policy))
    if chain.drafter is not None:
        under_drafter = chain.drafter.gather(1, tokens[:, None])[:, 0].cpu().numpy()
        assert (under_drafter > 0).all(), "a drafted token has probability 0 in the draft's own distribution"
    weight = _weights(chain, under_policy / under_drafter)
    at_parent = weight[layout.parents]
    if chain.drafter is None:
        excess = at_parent * (1.0 - under_policy)  # at the token itself, p P - 1 <= 0
    else:
        scaled = chain.policy[parents] * torch.from_numpy(at_parent).to(chain.policy.device)[:, None]
        excess = (scaled - chain.drafter).clamp_(min=0).sum(-1).cpu().numpy()
    return BlockRule(weight, _accept(chain, weight, excess))


def _weights(chain: ChainDraft, ratios: np.ndarray) -> np.ndarray:
    layout = chain.layout
    weight = np.ones(len(chain.policy))
    for depth in range(1, int(chain.counts.max(initial=0)) + 1):
        rows = np.flatnonzero(chain.counts >= depth)
        fed = layout.starts[rows] + depth
        weight[fed] = np.minimum(weight[fed - 1] * ratios[fed - rows - 1], 1.0)
    return weight


def _accept(chain: ChainDraft, weight: np.ndarray, excess: np.ndarray) -> np.ndarray:
    """h_i from p_i and the mass `excess` float64 [N] of the residual at each node's parent."""
    accept = weight[chain.layout.nodes]  # h_g = p_g; the others below
    inner = np.flatnonzero(np.diff(chain.layout.nodes) == 1)  # nodes followed by one of the same row
    mass, missing = excess[inner + 1], 1.0 - accept[inner]
    # 0 / 0: P = Q after a certain prefix, so the next token is certain too and h_i never matters.
    accept[inner] = np.divide(mass, mass + missing, out=np.ones(len(inner)), where=mass + missing > 0)
    return accept


def accepted_lengths(chain: ChainDraft, rule: BlockRule, uniforms: np.ndarray) -> np.ndarray:
    """Accepted tokens int64 [B] of each row, from independent `uniforms` float64 [N] in [0, 1)."""
    layout = chain.layout
    is_hit = np.zeros(len(chain.policy), bool)
    is_hit[layout.nodes] = uniforms < rule.accept
    lengths: np.ndarray = np.maximum.reduceat(is_hit * _depths(chain), layout.starts)
    return lengths


def emitted_rows(chain: ChainDraft, lengths: np.ndarray) -> np.ndarray:
    """Bool [T]: the roots and the first `lengths` int [B] nodes of each row."""
    emitted: np.ndarray = _depths(chain) <= lengths.repeat(chain.counts + 1)
    return emitted


def _depths(chain: ChainDraft) -> np.ndarray:
    """Int [T]: 0 at roots."""
    depths: np.ndarray = np.arange(len(chain.policy)) - chain.layout.starts.repeat(chain.counts + 1)
    return depths


def residuals(chain: ChainDraft, rule: BlockRule, rows: np.ndarray, lengths: np.ndarray) -> Tensor:
    """What the token after the accepted ones is drawn from, where some were rejected: float64 [R, V], not normalized.

    `rows` int [R] are batch rows with `lengths[rows] < counts[rows]`; `lengths` int [B].
    """
    device = chain.policy.device
    fed = chain.layout.starts[rows] + lengths[rows]
    policy = chain.policy[torch.from_numpy(fed).to(device)]
    rejected = fed - rows  # the node after the fed row
    if chain.drafter is None:
        tokens = torch.from_numpy(chain.tokens[rejected].astype(np.int64)).to(device)
        rest = policy.scatter(1, tokens[:, None], 0.0)
    else:
        weight = torch.from_numpy(rule.weight[fed]).to(device)[:, None]
        rest = (policy * weight - chain.drafter[torch.from_numpy(rejected).to(device)]).clamp_(min=0)
    # Nothing is left only where P = Q to rounding: then P itself is the answer to rounding.
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, policy)


def block_verify(
    policy: np.ndarray, drafter: np.ndarray | None, tokens: np.ndarray, uniforms: np.ndarray, final: float
) -> tuple[int, int]:
    """One chain: (accepted length, the token after it).

    `policy` float [g + 1, V], `drafter` float [g, V] (None: one-hot), `tokens` int [g]; `uniforms` float [g] and
    `final` are in [0, 1). The last token is drawn with `final` by inversion.
    """
    counts = np.array([len(tokens)], np.int32)
    none = np.zeros(len(tokens))
    draft = Draft(counts, tokens.astype(np.int32), none, none, probs=drafter)
    chain = ChainDraft.of(draft, torch.from_numpy(policy).double())
    rule = block_rule(chain)
    lengths = accepted_lengths(chain, rule, uniforms)
    if lengths[0] < counts[0]:
        mass = residuals(chain, rule, np.zeros(1, np.int64), lengths)[0].numpy()
    else:
        mass = chain.policy[-1].numpy()
    return int(lengths[0]), invert(mass, final)


def invert(mass: np.ndarray, uniform: float) -> int:
    """The token at `uniform` in [0, 1) of the distribution proportional to `mass` float64 [V]; never one of mass 0."""
    total = np.cumsum(mass)
    # u < 1 in float64 times a number is less than the number, so the place is inside and has mass.
    return int(np.searchsorted(total, uniform * total[-1], side="right"))
