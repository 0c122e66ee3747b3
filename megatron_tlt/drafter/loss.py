"""The loss of an EAGLE drafter: the policy's hidden states and, through its frozen LM head, its distributions.

For unrolled step j, over the bases that have it, with z = o W^T and p, q the softmax of policy and drafter at the
rollout temperature:

    gamma^j * mean( w_h * SmoothL1(o, h) + w_ce * CE(p, q) + w_tv * TV(p, q) )

SmoothL1 is a mean over the hidden size; TV = 1/2 sum |p - q| is one minus the share of drafts that ideal verification
accepts (Leviathan et al., 2211.17192, section 3). SmoothL1 keeps long drafts on course: without it the drafter reads
hidden states of its own that no policy has, and acceptance falls from position to position.
`lk` instead mixes per row KL and TV by exp(-3 * acceptance) (LK losses, 2602.23881): KL while the overlap is small.

Legend: N rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from megatron_tlt.config.drafter import DrafterLossSection
from megatron_tlt.models.eagle.pairs import PairBatch, PairLayout

_MAX_ELEMENTS = 1 << 25  # of [rows, V] at a time: bounds the temporaries of the LM head
_LK_SHARPNESS = 3.0  # of the mixture of KL and TV, as in the paper

LossParts = dict[str, list[Tensor]]  # means by unrolled step, 0-d


def eagle_loss(
    outputs: Sequence[Tensor],
    batch: PairBatch,
    layout: PairLayout,
    head: Tensor,
    loss: DrafterLossSection,
    temperature: float = 1.0,
    counts: Sequence[int] | None = None,
) -> tuple[Tensor, LossParts]:
    """The loss (0-d, differentiable in `outputs`) of `EagleModel.unroll`'s outputs [N, H], and its parts by step:
    `hidden` (SmoothL1), `ce`, `accept` (1 - TV).

    A step that no sequence is long enough for adds nothing. How sequences are packed does not matter: every term
    is a sum over rows divided by their number. `counts` are those numbers where the batch is only a share of a
    larger one: the losses and parts of all shares then add up to that of the whole.
    """
    total = torch.zeros((), device=head.device)
    parts: LossParts = {"hidden": [], "ce": [], "accept": []}
    for step, output in enumerate(outputs):
        valid = layout.existing(step)
        rows = layout.bases[valid] + step
        target, drafted = batch.hidden.index_select(0, rows), output.index_select(0, valid).float()
        count = max(1, len(rows) if counts is None else counts[step])
        near = smooth_l1_loss(drafted, target.float(), reduction="sum") / (count * target.shape[1])
        far, ce, accept = FrozenHeadLoss.apply(drafted, target, head, loss, temperature)  # type: ignore[no-untyped-call]
        total = total + loss.step_decay**step * (loss.hidden_weight * near + far / count)
        for values, value in zip(parts.values(), (near, ce / count, accept / count), strict=True):
            values.append(value.detach())
    return total, parts


class FrozenHeadLoss(torch.autograd.Function):
    """Sum over rows of w_ce * CE + w_tv * TV behind an LM head that gets no gradient.

    The gradient in the drafter's hidden states is taken in the forward pass, block of rows by block of rows, so
    that no [N, V] outlives its block. With g = 1/2 sign(q - p): dTV/dz = q (g - <g, q>) / T, dCE/dz = (q - p) / T.
    """

    @staticmethod
    def forward(
        ctx: Any, drafted: Tensor, target: Tensor, head: Tensor, loss: DrafterLossSection, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """drafted [N, H] float32, target [N, H], head [V, H] -> sums: loss; cross entropy; 1 - TV."""
        gradient = torch.empty_like(drafted)
        sums = drafted.new_zeros(3)
        rows = max(1, _MAX_ELEMENTS // head.shape[0])
        for i in range(0, len(drafted), rows):
            block = slice(i, i + rows)
            gradient[block], more = _block_loss(drafted[block], target[block], head, loss, temperature or 1.0)
            sums += more
        ctx.save_for_backward(gradient)
        total, ce, accept = (value.clone() for value in sums)
        ctx.mark_non_differentiable(ce, accept)
        return total, ce, accept

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        """Scales the stored gradient."""
        (gradient,) = ctx.saved_tensors
        return gradient * upstream, None, None, None, None


def _block_loss(
    drafted: Tensor, target: Tensor, head: Tensor, loss: DrafterLossSection, t: float
) -> tuple[Tensor, Tensor]:
    """Gradient [R, H] of the rows' summed loss at temperature `t`, and the sums of loss, cross entropy and 1 - TV."""
    p = (target.to(head.dtype) @ head.T).float().div_(t).softmax(-1)
    log_q = (drafted.to(head.dtype) @ head.T).float().div_(t).log_softmax(-1)
    ce = -(p * log_q).sum(-1)
    q = log_q.exp_()
    difference = q - p
    tv = 0.5 * difference.abs().sum(-1)
    if loss.kind == "lk":  # constants for the gradient
        w_ce = torch.exp(-_LK_SHARPNESS * (1 - tv))[:, None]
        w_tv = 1 - w_ce
    else:
        w_ce, w_tv = (torch.full_like(tv, w)[:, None] for w in (loss.ce_weight, loss.tv_weight))
    total = w_ce * ce[:, None] + w_tv * tv[:, None]
    if loss.kind == "lk":  # KL, not CE: the policy's entropy is a constant of the row
        total = total + w_ce * (p * p.clamp(min=1e-30).log()).sum(-1, keepdim=True)
    del p  # five float32 [R, V] at most are there at a time
    sign = difference.sign().mul_(0.5)
    gradient = sign.sub_((sign * q).sum(-1, keepdim=True)).mul_(q)
    gradient = gradient.mul_(w_tv).add_(difference.mul_(w_ce)).div_(t)
    sums = torch.stack([total.sum(), ce.sum(), (1 - tv).sum()])
    return (gradient.to(head.dtype) @ head).float(), sums
