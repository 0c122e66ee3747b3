"""The part of a drafter's loss behind an LM head: cross entropy and total variation against the policy.

TV = 1/2 sum |p - q| is one minus the share of drafts that ideal verification accepts (Leviathan et al., 2211.17192,
section 3). Several drafted rows, one a position at most, are compared with the same row of the policy: p is computed
once for all of them. Where the drafter's vocabulary is reduced, p is the policy's over it, renormalised, so that the
LM head is multiplied for the drafter's tokens only. A row whose next token, drawn by the policy, is outside has no
loss: it would teach another token than the policy's. It counts as not accepted.

Legend: M drafted rows, U rows of the policy, J drafted positions, H hidden size, Vd tokens of the drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.config.planning.drafter import HEAD_BLOCK
from megatron_tlt.distributed.processors import has_bf16_products
from megatron_tlt.drafters.model import DraftBatch

_CE = 0.1  # weight of the cross entropy with the policy's distribution: what moves a draft of no acceptance
_TV = 0.9  # of the total variation, which is one minus the acceptance
_DECAY = 0.8  # from one drafted position to the next, which is verified less often


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


@dataclass(frozen=True, slots=True)
class LossInputs:
    """A batch, and what its loss is made of beside the drafter."""

    batch: DraftBatch  # the last H columns of `hidden` are the policy's final hidden state
    embed: Tensor  # [V, H], the policy's
    head: Tensor  # [V, H]
    steps: int  # drafted positions
    hidden_weight: float  # of the distance to the policy's hidden states (kind eagle)
    temperature: float  # of rollouts, above 0
    # Rows of each position of a larger batch, of which this one is a share: the losses and parts of all shares add up.
    counts: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class PolicyRows:
    """The distributions that drafted rows are compared with, and the weights of their losses."""

    states: Tensor  # [U, H], the policy's
    head: Tensor  # [Vd, H], rows of the policy's LM head for the drafter's tokens
    known: Tensor | None  # bool [U], rows whose next token is one of these; None: all
    rows: DraftedRows
    scale: Tensor  # float32 [M]
    temperature: float

    @classmethod
    def of(cls, given: LossInputs, ids: Tensor | None, targets: Sequence[np.ndarray], weights: Tensor) -> PolicyRows:
        """`targets`: of each drafted position its rows of the batch, whose losses are multiplied by `weights` [J]
        and the decay. `ids` [Vd]: the drafter's tokens; None: all.
        """
        batch, head, rows = given.batch, given.head, DraftedRows.of(targets, weights.device)
        states, known = batch.hidden[:, -head.shape[1] :].index_select(0, rows.policy), None
        if ids is not None:
            head, known = head.index_select(0, ids), torch.isin(batch.tokens.index_select(0, rows.policy + 1), ids)
        if head.device.type == "cpu" and not has_bf16_products():
            head = head.float()  # products of bf16 in software take several times as long
        weights = weights * _DECAY ** torch.arange(len(weights), device=weights.device)
        return cls(states, head, known, rows, weights[rows.step], given.temperature)

    def sort(self, drafted: Sequence[Tensor]) -> Tensor:
        """Float32 [M, W] of the outputs of each drafted position, in the order of the drafted rows."""
        return torch.cat(list(drafted)).float().index_select(0, self.rows.output)

    def means(self, found: Tensor, weights: Tensor) -> Tensor:
        """Sums [J] of `found` [M] by drafted position, times `weights` [J]."""
        return torch.zeros_like(weights).index_add_(0, self.rows.step, found) * weights

    def compare(
        self, logits: Callable[[slice], Tensor], learn: Callable[[slice, Tensor], None], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The sum over drafted rows of scale * (w_ce * CE + w_tv * TV); CE and 1 - TV of each row [M].

        Block of rows by block of rows, so that no [rows, Vd] outlives its block: `logits` returns the drafter's,
        float32 [R, Vd], which are overwritten, and `learn` gets the loss's gradient in them, of `dtype`. With
        g = 1/2 sign(q - p): dTV/dz = q (g - <g, q>) / T, dCE/dz = (q - p) / T.
        """
        rows, t = self.rows, self.temperature
        found, total = self.scale.new_zeros(2, len(self.scale)), self.scale.new_zeros(())
        most = int(np.diff(rows.ends).max(initial=1))  # drafted rows of one row of the policy
        size = max(1, HEAD_BLOCK // (most * len(self.head)))
        for first in range(0, len(self.states), size):
            last = min(first + size, len(self.states))
            block = slice(int(rows.ends[first]), int(rows.ends[last]))
            at = rows.at[block]
            p = (self.states[first:last].to(self.head.dtype) @ self.head.T).float().div_(t).softmax(-1)
            weight = self.scale[block] if self.known is None else self.scale[block] * self.known[at]
            log_q = logits(block).div_(t).log_softmax(-1)
            if len(at) > last - first:
                p = p[at - first]
            gradient, found[:, block] = _row_losses(p, log_q, weight / t)
            gradient = gradient.to(dtype)
            learn(block, gradient)
            total += (weight * (_CE * found[0, block] + _TV * (1 - found[1, block]))).sum()
        if self.known is not None:
            found *= self.known[rows.at]
        return total, found[0], found[1]


class HeadLoss(torch.autograd.Function):
    """`PolicyRows.compare` behind an LM head, with gradients that are taken in the forward pass."""

    @staticmethod
    def forward(ctx: Any, drafted: Tensor, own: Tensor, policy: PolicyRows) -> tuple[Tensor, Tensor, Tensor]:
        """drafted [M, H] float32, sorted; the LM head `own` [Vd, H] gets a gradient where it requires one."""
        gradient = torch.empty_like(drafted)
        of_head = torch.zeros_like(own, dtype=torch.float32) if ctx.needs_input_grad[1] else None

        def learn(block: slice, by_logit: Tensor) -> None:
            gradient[block] = (by_logit @ own).float()
            if of_head is not None:
                of_head.add_(by_logit.T @ drafted[block].to(own.dtype))

        total, ce, accept = policy.compare(lambda b: (drafted[b].to(own.dtype) @ own.T).float(), learn, own.dtype)
        ctx.save_for_backward(gradient, of_head)
        ctx.mark_non_differentiable(ce, accept)
        return total, ce, accept

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *scaled(ctx.saved_tensors, upstream), None


def scaled(gradients: Sequence[Tensor | None], upstream: Tensor) -> list[Tensor | None]:
    """Each gradient times the `upstream` one (0-d)."""
    return [None if gradient is None else gradient * upstream for gradient in gradients]


def _row_losses(p: Tensor, log_q: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Of rows of p and log q [R, Vd]: the gradient [R, Vd] of their loss, times `scale` [R], in the drafter's logits
    over T; and their CE and 1 - TV [2, R]. Overwrites both.
    """
    ce = -(p * log_q).sum(-1)
    q = log_q.exp_()
    difference = torch.sub(q, p, out=p)
    tv = 0.5 * difference.abs().sum(-1)
    sign = difference.sign().mul_(0.5)
    gradient = sign.sub_((sign * q).sum(-1, keepdim=True)).mul_(q)
    gradient = gradient.mul_(_TV).add_(difference, alpha=_CE).mul_(scale[:, None])
    return gradient, torch.stack([ce, 1 - tv])
