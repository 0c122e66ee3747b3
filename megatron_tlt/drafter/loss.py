"""The loss of a drafter: the policy's hidden states (kind eagle) and its distributions.

For unrolled step j, over the bases that have it, with z = o W^T, through the policy's frozen LM head or, of kind
eagle3, norm and head of its own, and p, q the softmax of policy and drafter at the rollout temperature:

    gamma^j * mean( w_h * SmoothL1(o, h) + w_ce * CE(p, q) + w_tv * TV(p, q) )

SmoothL1 is a mean over the hidden size; TV = 1/2 sum |p - q| is one minus the share of drafts that ideal verification
accepts (Leviathan et al., 2211.17192, section 3). SmoothL1 keeps long drafts on course: without it the drafter reads
hidden states of its own that no policy has, and acceptance falls from position to position. EAGLE-3 (2503.01840,
section 3) leaves it out. Where the drafter's vocabulary is reduced, p is the policy's over it, renormalised, and rows
whose most likely token is outside have no loss: they would teach the policy's second choice (SpecForge's rule).

Legend: N rows, H hidden size, V vocabulary, Vd the drafter's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from megatron_tlt.config.drafter import DrafterLossSection
from megatron_tlt.models.eagle.model import PairModel
from megatron_tlt.models.eagle.pairs import PairBatch, PairLayout

_MAX_ELEMENTS = 1 << 25  # of [rows, V] at a time: bounds the temporaries of the LM head

LossParts = dict[str, list[Tensor]]  # means by unrolled step, 0-d


def part_names(model: PairModel) -> tuple[str, ...]:
    """The parts of its loss by step: `hidden` (SmoothL1), `ce`, `accept` (1 - TV)."""
    return ("hidden", "ce", "accept") if model.imitates_states else ("ce", "accept")


def draft_loss(
    model: PairModel,
    outputs: Sequence[Tensor],
    batch: PairBatch,
    layout: PairLayout,
    head: Tensor,
    loss: DrafterLossSection,
    temperature: float = 1.0,
    counts: Sequence[int] | None = None,
) -> tuple[Tensor, LossParts]:
    """The loss (0-d, differentiable) of `PairModel.unroll`'s outputs [N, H], and its `part_names`.

    The last H columns of `batch.hidden` are the policy's final hidden state; head [V, H] is the policy's. 1 - TV is
    over the whole vocabulary: a token outside the drafter's cannot be accepted. A step that no sequence is long enough
    for adds nothing. How sequences are packed does not matter: every term is a sum over rows divided by their number.
    `counts` are those numbers where the batch is only a share of a
    larger one: the losses and parts of all shares then add up to that of the whole.
    """
    total = torch.zeros((), device=head.device)
    parts: LossParts = {name: [] for name in part_names(model)}
    states, ids, own = batch.hidden[:, -head.shape[1] :], model.token_ids(), model.own_head(head)
    for step, output in enumerate(outputs):
        valid = layout.existing(step)
        rows = layout.bases[valid] + step
        target, drafted = states.index_select(0, rows), output.index_select(0, valid).float()
        count = max(1, len(rows) if counts is None else counts[step])
        given = model.before_head(drafted), own, target, head, ids, loss, temperature
        far, ce, accept = HeadLoss.apply(*given)  # type: ignore[no-untyped-call]
        means = {"ce": ce / count, "accept": accept / count}
        value = far / count
        if model.imitates_states:
            near = smooth_l1_loss(drafted, target.float(), reduction="sum") / (count * target.shape[1])
            means, value = {"hidden": near, **means}, loss.hidden_weight * near + value
        total = total + loss.step_decay**step * value
        for name, mean in means.items():
            parts[name].append(mean.detach())
    return total, parts


class HeadLoss(torch.autograd.Function):
    """Sum over rows of w_ce * CE + w_tv * TV behind an LM head, with a gradient in the head where it requires one.

    The gradients are taken in the forward pass, block of rows by block of rows, so that no [N, V] outlives its block.
    With g = 1/2 sign(q - p): dTV/dz = q (g - <g, q>) / T, dCE/dz = (q - p) / T.
    """

    @staticmethod
    def forward(
        ctx: Any,
        drafted: Tensor,
        own: Tensor,
        target: Tensor,
        head: Tensor,
        ids: Tensor | None,
        loss: DrafterLossSection,
        temperature: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """drafted [N, H] float32 and own [Vd, H] of the drafter, target [N, H] and head [V, H] of the policy, ids [Vd]
        of the drafter's tokens or None -> sums: loss; cross entropy; 1 - TV.
        """
        gradient = torch.empty_like(drafted)
        of_head = torch.zeros_like(own, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        sums = drafted.new_zeros(3)
        rows = max(1, _MAX_ELEMENTS // head.shape[0])
        for i in range(0, len(drafted), rows):
            block = slice(i, i + rows)
            policy = target[block], head, ids
            by_logit, more = _block_loss(drafted[block], own, policy, loss, temperature or 1.0)
            gradient[block] = (by_logit @ own).float()
            if of_head is not None:
                of_head += by_logit.T @ drafted[block].to(own.dtype)
            sums += more
        ctx.save_for_backward(gradient, of_head)
        total, ce, accept = (value.clone() for value in sums)
        ctx.mark_non_differentiable(ce, accept)
        return total, ce, accept

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Scales the stored gradients."""
        gradient, of_head = ctx.saved_tensors
        by_head = None if of_head is None else of_head * upstream
        return gradient * upstream, by_head, None, None, None, None, None


def _policy(target: Tensor, head: Tensor, ids: Tensor | None, t: float) -> tuple[Tensor, Tensor | None]:
    """The policy's probabilities [R, Vd] of the drafter's tokens; bool [R]: rows whose most likely token is one."""
    p = (target.to(head.dtype) @ head.T).float().div_(t).softmax(-1)
    return (p, None) if ids is None else (p[:, ids], torch.isin(p.argmax(-1), ids))


def _block_loss(
    drafted: Tensor,
    own: Tensor,
    policy: tuple[Tensor, Tensor, Tensor | None],
    loss: DrafterLossSection,
    t: float,
) -> tuple[Tensor, Tensor]:
    """Gradient [R, Vd] of the rows' summed loss in the logits, and the sums of loss, cross entropy and 1 - TV.

    `policy`: its hidden states [R, H], LM head and the drafter's ids.
    """
    p, known = _policy(*policy, t)
    log_q = (drafted.to(own.dtype) @ own.T).float().div_(t).log_softmax(-1)
    accept = None
    if known is not None:
        accept = torch.minimum(p, log_q.exp()).sum(-1)
        p = p / p.sum(-1, keepdim=True)
    ce = -(p * log_q).sum(-1)
    q = log_q.exp_()
    difference = q - p
    tv = 0.5 * difference.abs().sum(-1)
    total = loss.ce_weight * ce + loss.tv_weight * tv
    del p  # five float32 [R, V] at most are there at a time
    sign = difference.sign().mul_(0.5)
    gradient = sign.sub_((sign * q).sum(-1, keepdim=True)).mul_(q)
    gradient = gradient.mul_(loss.tv_weight).add_(difference.mul_(loss.ce_weight)).div_(t)
    if known is not None:
        total, ce, gradient = total * known, ce * known, gradient.mul_(known[:, None])
    return gradient.to(own.dtype), torch.stack([total.sum(), ce.sum(), (1 - tv if accept is None else accept).sum()])
