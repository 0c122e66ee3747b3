"""What a drafter learns from: the policy's hidden states and, through its frozen LM head, its distributions.

For unrolled step j, over the bases that have it, with z = o W^T and p, q the softmax of policy and drafter at the
rollout temperature:

    gamma^j * mean( w_h * SmoothL1(o, h) + w_ce * CE(p, q) + w_tv * TV(p, q) )

SmoothL1 is a mean over the hidden size; TV = 1/2 sum |p - q| is one minus the share of drafts that ideal verification
accepts (Leviathan et al., 2211.17192, section 3). SmoothL1 keeps long drafts on course: without it, the hidden states
that the drafter feeds to itself are nobody's, and acceptance falls from position to position.
`lk` instead mixes per row KL and TV by exp(-3 * acceptance) (LK losses, 2602.23881): KL while the overlap is small.

Legend: N rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from megatron_tlt.models.eagle.pairs import PairBatch, PairLayout

_ELEMENTS_AT_ONCE = 1 << 25  # of [rows, V]: bounds the temporaries of the LM head
_LK_SHARPNESS = 3.0


@dataclass(frozen=True, slots=True)
class LossWeights:
    """The loss's constants; `kind` "mix" uses all of them, "lk" replaces ce and tv by its own mixture."""

    kind: Literal["mix", "lk"] = "mix"
    hidden: float = 1.0
    ce: float = 0.1
    tv: float = 0.9
    gamma: float = 0.8
    temperature: float = 1.0


@dataclass(slots=True)
class LossReport:
    """Means by unrolled step; `counts` says over how many rows. On the CPU."""

    counts: list[int]
    hidden: list[float]  # SmoothL1
    ce: list[float]
    accept: list[float]  # 1 - TV


def draft_loss(
    outputs: Sequence[Tensor],
    batch: PairBatch,
    layout: PairLayout,
    head: Tensor,
    weights: LossWeights,
    counts: Sequence[int] | None = None,
) -> tuple[Tensor, LossReport]:
    """The loss (0-d, differentiable in `outputs`) of `EagleModel.unroll`'s outputs [N, H] and its parts by step.

    A step that no sequence is long enough for adds nothing. How sequences are packed does not matter: every term
    is a sum over rows divided by their number. `counts` are those numbers where the batch is only a share of a
    larger one: the losses (and reports) of all shares then add up to that of the whole.
    """
    total = torch.zeros((), device=head.device)
    report = LossReport([], [], [], [])
    for step, output in enumerate(outputs):
        valid = layout.valid(step)
        rows = layout.bases[valid] + step
        target, drafted = batch.hidden[rows], output[valid].float()
        count = max(1, len(rows) if counts is None else counts[step])
        near = smooth_l1_loss(drafted, target.float(), reduction="sum") / (count * target.shape[1])
        far, ce, accept = FrozenHeadLoss.apply(drafted, target, head, weights)  # type: ignore[no-untyped-call]
        total = total + weights.gamma**step * (weights.hidden * near + far / count)
        report.counts.append(len(rows))
        for values, value in (
            (report.hidden, near),
            (report.ce, ce / count),
            (report.accept, accept / count),
        ):
            values.append(float(value.detach()))
    return total, report


class FrozenHeadLoss(torch.autograd.Function):
    """Sum over rows of w_ce * CE + w_tv * TV behind an LM head that gets no gradient.

    The gradient in the drafter's hidden states is taken in the forward pass, block of rows by block of rows, so
    that no [N, V] outlives its block. With g = 1/2 sign(q - p): dTV/dz = q (g - <g, q>) / T, dCE/dz = (q - p) / T.
    """

    @staticmethod
    def forward(
        ctx: Any, drafted: Tensor, target: Tensor, head: Tensor, weights: LossWeights
    ) -> tuple[Tensor, Tensor, Tensor]:
        """drafted [N, H] float32, target [N, H], head [V, H] -> sums: loss; cross entropy; 1 - TV."""
        gradient = torch.empty_like(drafted)
        sums = drafted.new_zeros(3)
        rows = max(1, _ELEMENTS_AT_ONCE // head.shape[0])
        for i in range(0, len(drafted), rows):
            part = slice(i, i + rows)
            gradient[part], more = _rows_loss(drafted[part], target[part], head, weights)
            sums += more
        ctx.save_for_backward(gradient)
        loss, ce, accept = (value.clone() for value in sums)
        ctx.mark_non_differentiable(ce, accept)
        return loss, ce, accept

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        """Scales the stored gradient."""
        (gradient,) = ctx.saved_tensors
        return gradient * upstream, None, None, None


def _rows_loss(drafted: Tensor, target: Tensor, head: Tensor, w: LossWeights) -> tuple[Tensor, Tensor]:
    """Gradient [R, H] of the rows' summed loss, and the sums of loss, cross entropy and 1 - TV."""
    t = w.temperature or 1.0
    p = ((target.to(head.dtype) @ head.T).float() / t).softmax(-1)
    log_q = ((drafted.to(head.dtype) @ head.T).float() / t).log_softmax(-1)
    q = log_q.exp()
    difference = q - p
    ce = -(p * log_q).sum(-1)
    tv = 0.5 * difference.abs().sum(-1)
    w_ce, w_tv = _row_weights(tv, w)
    sign = difference.sign().mul_(0.5)
    gradient = q * (sign - (sign * q).sum(-1, keepdim=True))
    gradient = gradient.mul_(w_tv).add_(difference * w_ce).div_(t)
    loss = w_ce * ce[:, None] + w_tv * tv[:, None]
    if w.kind == "lk":  # KL, not CE: the policy's entropy is a constant of the row
        loss = loss + w_ce * (p * p.clamp(min=1e-30).log()).sum(-1, keepdim=True)
    sums = torch.stack([loss.sum(), ce.sum(), (1 - tv).sum()])
    return (gradient.to(head.dtype) @ head).float(), sums


def _row_weights(tv: Tensor, w: LossWeights) -> tuple[Tensor, Tensor]:
    """Weights of CE and TV, [R, 1] each; constants for the gradient."""
    if w.kind == "lk":
        share = torch.exp(-_LK_SHARPNESS * (1 - tv))[:, None]
        return share, 1 - share
    return torch.full_like(tv, w.ce)[:, None], torch.full_like(tv, w.tv)[:, None]
