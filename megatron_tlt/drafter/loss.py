"""The part of a drafter's loss behind an LM head: cross entropy and total variation against the policy.

TV = 1/2 sum |p - q| is one minus the share of drafts that ideal verification accepts (Leviathan et al., 2211.17192,
section 3). Several drafted rows, one a position at most, are compared with the same row of the policy: p is computed
once for all of them. Where the drafter's vocabulary is reduced, p is the policy's over it, renormalised, so that the
LM head is multiplied for the drafter's tokens only. A row whose next token, drawn by the policy, is outside has no
loss: it would teach another token than the policy's. It counts as not accepted.

Legend: M drafted rows, U rows of the policy, J drafted positions, H hidden size, Vd tokens of the drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.config.drafter import LossWeights

_MAX_ELEMENTS = 1 << 25  # of [rows, Vd] at a time: bounds the temporaries of the LM head


@dataclass(frozen=True, slots=True)
class DraftedRows:
    """Which row of the policy each drafted row is compared with. Drafted rows are sorted by it."""

    policy: Tensor  # [U] int64, ascending: rows of the batch
    ends: np.ndarray  # [U + 1], on the host: rows ends[u] .. ends[u + 1] - 1 are compared with policy[u]
    at: Tensor  # [M] int64, the u of each
    step: Tensor  # [M] int64, its drafted position, 0 .. J - 1
    output: Tensor  # [M] int64, its place among the drafted rows of all positions, those of the first position first

    @classmethod
    def of(cls, rows: Sequence[np.ndarray], device: torch.device) -> DraftedRows:
        """`rows`: of each position the batch's rows that its drafted rows are compared with. Nothing comes back from
        the device."""
        every = np.concatenate(rows)
        order = np.argsort(every, kind="stable")
        policy, counts = np.unique(every, return_counts=True)
        step = np.repeat(np.arange(len(rows)), [len(of_step) for of_step in rows])
        at = np.repeat(np.arange(len(policy)), counts)

        def here(values: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(device, non_blocking=True)

        return cls(here(policy), np.append(0, counts.cumsum()), here(at), here(step[order]), here(order))


class HeadLoss(torch.autograd.Function):
    """Sum over drafted rows of scale * (w_ce * CE + w_tv * TV) behind an LM head, with a gradient in the drafter's head
    where it requires one.

    The gradients are taken in the forward pass, block of rows by block of rows, so that no [rows, Vd] outlives its
    block. With g = 1/2 sign(q - p): dTV/dz = q (g - <g, q>) / T, dCE/dz = (q - p) / T.
    """

    @staticmethod
    def forward(
        ctx: Any,
        drafted: Tensor,
        own: Tensor,
        policy: tuple[Tensor, Tensor, Tensor | None],
        rows: DraftedRows,
        scale: Tensor,
        loss: LossWeights,
        temperature: float,
        before: Tensor | None = None,
        bias: Tensor | None = None,
        num_candidates: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """drafted [M, H] float32, sorted as `rows`, and own [Vd, H] of the drafter; of the policy its states [U, H],
        its LM head's rows of the drafter's tokens [Vd, H], and bool [U], rows whose next token is one of them (None:
        all); scale [M] -> the sum; CE and 1 - TV of each row [M]; its largest logits and their columns
        [M, num_candidates]. A Markov head adds before [M, r] times bias [Vd, r] to the logits, and gets gradients in
        both.
        """
        states, head, known = policy
        gradient, t = torch.empty_like(drafted), temperature or 1.0
        of_head = torch.zeros_like(own, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        of_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        of_before = None if before is None else torch.empty_like(before)
        found = drafted.new_zeros(2, len(drafted))
        best = drafted.new_empty(len(drafted), num_candidates)
        columns = rows.at.new_empty(best.shape)
        total = drafted.new_zeros(())
        most = int(np.diff(rows.ends).max(initial=1))  # drafted rows of one row of the policy
        size = max(1, _MAX_ELEMENTS // (most * len(head)))
        for first in range(0, len(states), size):
            last = min(first + size, len(states))
            block = slice(int(rows.ends[first]), int(rows.ends[last]))
            at = rows.at[block]
            p = (states[first:last].to(head.dtype) @ head.T).float().div_(t).softmax(-1)
            weight = scale[block] if known is None else scale[block] * known[at]
            logits = (drafted[block].to(own.dtype) @ own.T).float()
            if before is not None and bias is not None:
                logits += before[block].to(bias.dtype) @ bias.T
            if num_candidates:
                best[block], columns[block] = logits.topk(num_candidates)
            log_q = logits.div_(t).log_softmax(-1)
            del logits
            if len(at) > last - first:
                p = p[at - first]
            by_logit, found[:, block] = _row_losses(p, log_q, weight / t, loss)
            by_logit = by_logit.to(own.dtype)
            gradient[block] = (by_logit @ own).float()
            if of_head is not None:
                of_head += by_logit.T @ drafted[block].to(own.dtype)
            if before is not None and bias is not None and of_before is not None and of_bias is not None:
                by_bias = by_logit.to(bias.dtype)
                of_before[block] = (by_bias @ bias).to(before.dtype)
                of_bias += by_bias.T @ before[block].to(bias.dtype)
            total += (weight * (loss.ce_weight * found[0, block] + loss.tv_weight * (1 - found[1, block]))).sum()
        if known is not None:
            found *= known[rows.at]
        ctx.save_for_backward(gradient, of_head, of_before, of_bias)
        ce, accept = found
        ctx.mark_non_differentiable(ce, accept, best, columns)
        return total, ce, accept, best, columns

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Scales the stored gradients."""
        gradient, *of_others = ctx.saved_tensors
        by_head, by_before, by_bias = (None if t is None else t * upstream for t in of_others)
        return gradient * upstream, by_head, None, None, None, None, None, by_before, by_bias, None


def _row_losses(p: Tensor, log_q: Tensor, scale: Tensor, loss: LossWeights) -> tuple[Tensor, Tensor]:
    """Of rows of p and log q [R, Vd]: the gradient [R, Vd] of their loss, times `scale` [R], in the drafter's logits
    over T; and their CE and 1 - TV [2, R]. Overwrites both.
    """
    ce = -(p * log_q).sum(-1)
    q = log_q.exp_()
    difference = torch.sub(q, p, out=p)
    tv = 0.5 * difference.abs().sum(-1)
    sign = difference.sign().mul_(0.5)
    gradient = sign.sub_((sign * q).sum(-1, keepdim=True)).mul_(q)
    gradient = gradient.mul_(loss.tv_weight).add_(difference, alpha=loss.ce_weight).mul_(scale[:, None])
    return gradient, torch.stack([ce, 1 - tv])
