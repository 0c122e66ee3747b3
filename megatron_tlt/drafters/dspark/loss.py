"""The loss of block drafters: the policy's distributions at the positions of blocks from random anchors (2607.05147).

Over all drafted positions k of all blocks, as far as their texts go, with z_k = head norm(x_k) + W2 W1[token before],
and p, q the softmax of policy and drafter at the rollout temperature, over the drafter's vocabulary:

    mean( decay^k * (w_ce * CE(p, q) + w_tv * TV(p, q)) )        decay = exp(-1 / gamma), gamma = 4 in DSpark

It is one mean over positions, not over their weights, as in vllm-project/speculators (dspark/metrics.py): a block that
a text's end cuts weighs as many positions as it has.

DFlash 2 has no W2. Its selector gets a cross entropy of its own, weighted alike by position: of the true token behind,
over the 16 largest of z_k plus the selector's scores, at the rollout temperature. A true token that is not among them
takes the place of the last (speculators#1006). Its weight is 0.1, that of the published Qwen3-4B-speculator.dflash2. It
has no gradient in x_k and z_k: layers learn as without a selector.

One forward fills all blocks; the Markov head reads the true token before. A batch has about as many slots as it has
bases, so that each base is covered about once, and every batch draws other anchors. CE and TV: `drafters.loss`.

Legend: N bases, A anchors, H hidden size, V vocabulary, r rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron_tlt.config.block_drafters import NUM_CANDIDATES
from megatron_tlt.drafters.base import LossParts
from megatron_tlt.drafters.dspark.model import BlockModel, CandidateSelector
from megatron_tlt.drafters.eagle.pairs import PairLayout
from megatron_tlt.drafters.loss import LossInputs, PolicyRows, scaled

_SELECTOR_WEIGHT = 0.1


def draw_anchors(model: BlockModel, layout: PairLayout) -> np.ndarray:
    """Ascending numbers [A] of the layout's N bases, drawn at random by the model's steps: A = N / B, rounded up."""
    bases = layout.existing(0)
    random = np.random.default_rng((model.trained_steps, len(bases)))
    count = min(len(bases), -(-len(bases) // model.config.block_size))
    return np.sort(random.choice(bases, count, replace=False))


def block_loss(
    model: BlockModel,
    slots: Tensor,
    chosen: np.ndarray,
    layout: PairLayout,
    given: LossInputs,
) -> tuple[Tensor, LossParts]:
    """The loss (0-d, differentiable) of blocks `slots` [A, S, H] from the `chosen` bases [A], and its parts, means of
    the first `steps` drafted positions: `ce`, `accept` (1 - TV), 0 behind the block. All positions of a block are
    trained. The anchors of a share stand for all of its own bases.
    """
    batch, device, steps, counts = given.batch, given.head.device, given.steps, given.counts
    drafted = range(model.config.num_drafted)
    existing = [layout.existing(k) for k in drafted]
    here = [np.flatnonzero(np.isin(chosen, of_step)) for of_step in existing]  # anchors that have position k
    targets = [layout.base_rows[chosen[at]] + k for k, at in enumerate(here)]
    own = [len(of_step) for of_step in existing]
    whole = (own if counts is None else list(counts))[: len(own)]
    share = sum(own[: len(whole)]) / max(1, sum(whole))
    whole += own[len(whole) :]  # positions behind `counts` are in no metric
    per_row = [n / max(1, total) / max(1, len(at)) for n, total, at in zip(own, whole, here, strict=True)]
    by_step = torch.tensor(per_row, dtype=torch.float32).to(device, non_blocking=True)
    weights = torch.full_like(by_step, share / max(1, sum(map(len, here))))
    policy = PolicyRows.of(given, model.token_ids(), targets, weights)
    anchors = layout.here(layout.base_rows[chosen])
    outputs = [model.output(batch.tokens, (anchors + k).clamp(max=len(batch.tokens) - 1), slots, k) for k in drafted]
    parts = [out.index_select(0, layout.here(at)) for out, at in zip(outputs, here, strict=True)]
    states, before = policy.sort(parts).tensor_split([given.head.shape[1]], 1)
    selector, markov = model.candidate_selector, model.markov_head
    bias = None if markov is None else markov.markov_w2.weight
    inputs = states, before if markov else None, bias, policy, NUM_CANDIDATES if selector else 0
    total, ce, accept, best, columns = BlockLoss.apply(*inputs)  # type: ignore[no-untyped-call]
    if selector is not None:
        true = batch.tokens.index_select(0, policy.rows.policy + 1).index_select(0, policy.rows.at)
        of_true = (states.detach() * policy.head.index_select(0, true)).sum(-1)
        selected = _selector_ce(selector, before, best, columns, true, of_true, given.temperature)
        total = total + _SELECTOR_WEIGHT * (policy.scale * selected).sum()
    by_name: LossParts = {}
    for name, found in {"ce": ce, "accept": accept}.items():
        means = policy.means(found, by_step)
        by_name[name] = [*means[:steps], *means.new_zeros(max(0, steps - len(drafted)))]
    return total, by_name


class BlockLoss(torch.autograd.Function):
    """`PolicyRows.compare` behind the policy's LM head and what a block drafter adds to its logits."""

    @staticmethod
    def forward(
        ctx: Any,
        drafted: Tensor,
        before: Tensor | None,
        bias: Tensor | None,
        policy: PolicyRows,
        num_candidates: int,
    ) -> tuple[Tensor, ...]:
        """drafted [M, H] float32, sorted. A Markov head adds before [M, r] times bias [Vd, r], and gets gradients in
        both. Returns what `compare` does, and each row's largest logits and their columns [M, num_candidates].
        """
        head, gradient = policy.head, torch.empty_like(drafted)
        of_before = None if before is None else torch.empty_like(before)
        of_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        best = drafted.new_empty(len(drafted), num_candidates)
        columns = policy.rows.at.new_empty(best.shape)

        def logits(block: slice) -> Tensor:
            found = (drafted[block].to(head.dtype) @ head.T).float()
            if before is not None and bias is not None:
                found += before[block].to(bias.dtype) @ bias.T
            if num_candidates:
                best[block], columns[block] = found.topk(num_candidates)
            return found

        def learn(block: slice, by_logit: Tensor) -> None:
            gradient[block] = (by_logit @ head).float()
            if before is not None and bias is not None and of_before is not None and of_bias is not None:
                by_bias = by_logit.to(bias.dtype)
                of_before[block] = (by_bias @ bias).to(before.dtype)
                of_bias.add_(by_bias.T @ before[block].to(bias.dtype))

        total, ce, accept = policy.compare(logits, learn, head.dtype)
        ctx.save_for_backward(gradient, of_before, of_bias)
        ctx.mark_non_differentiable(ce, accept, best, columns)
        return total, ce, accept, best, columns

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *scaled(ctx.saved_tensors, upstream), None, None


def _selector_ce(
    selector: CandidateSelector,
    before: Tensor,
    logits: Tensor,
    candidates: Tensor,
    true: Tensor,
    of_true: Tensor,
    temperature: float,
) -> Tensor:
    """Cross entropies [M] of the `true` tokens [M], whose logits are `of_true` [M], among candidates [M, C] with their
    logits, of rows whose `CandidateSelector.context` is `before` [M, r].
    """
    missing = (candidates != true[:, None]).all(1)
    last = torch.where(missing, true, candidates[:, -1])
    candidates = torch.cat([candidates[:, :-1], last[:, None]], 1)
    last = torch.where(missing, of_true, logits[:, -1])
    scores = torch.cat([logits[:, :-1], last[:, None]], 1) + selector.scores(before, candidates)
    at = (candidates == true[:, None]).int().argmax(1)
    return cross_entropy(scores / temperature, at, reduction="none")
