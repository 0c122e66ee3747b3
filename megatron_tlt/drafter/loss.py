"""The part of a drafter's loss behind an LM head: cross entropy and total variation against the policy.

TV = 1/2 sum |p - q| is one minus the share of drafts that ideal verification accepts (Leviathan et al., 2211.17192,
section 3). Where the drafter's vocabulary is reduced, p is the policy's over it, renormalised, and rows whose most
likely token is outside have no loss: they would teach the policy's second choice (SpecForge's rule).

Legend: N rows, H hidden size, V vocabulary, Vd the drafter's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_tlt.config.drafter import DrafterLossSection

_MAX_ELEMENTS = 1 << 25  # of [rows, V] at a time: bounds the temporaries of the LM head


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
