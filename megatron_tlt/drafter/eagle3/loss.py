"""What an EAGLE-3 drafter learns from: the policy's distribution over the drafter's vocabulary.

For unrolled step j, over the bases that have it and whose most likely token of the policy the drafter knows, with
p the policy's probabilities of the drafter's tokens, renormalised, and q the drafter's:

    gamma^j * mean( CE(p, q) )

(EAGLE-3, 2503.01840, section 3: no distance to hidden states; which rows count when the vocabulary is reduced is
SpecForge's rule.) Rows whose most likely token is unknown would teach the drafter the policy's second choice.

Legend: N rows, H hidden size, V vocabulary, Vd the drafter's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_tlt.models.eagle.eagle3 import Eagle3Model
from megatron_tlt.models.eagle.pairs import PairBatch, PairLayout


@dataclass(slots=True)
class Report3:
    """By unrolled step, over the rows that exist: how many, how many count, mean CE of those, mean 1 - TV of all."""

    counts: list[int]
    known: list[int]
    ce: list[float]
    accept: list[float]


def eagle3_loss(
    model: Eagle3Model,
    outputs: Sequence[Tensor],
    batch: PairBatch,
    layout: PairLayout,
    head: Tensor,
    gamma: float = 0.8,
    temperature: float = 1.0,
) -> tuple[Tensor, Report3]:
    """The loss (0-d) of `Eagle3Model.unroll`'s outputs and its parts by step.

    The last H columns of `batch.hidden` are the policy's state after its final norm; head [V, H] is the policy's.
    1 - TV is taken over the whole vocabulary: what the drafter does not know it cannot get accepted. One step's
    [N, Vd] live at a time: they are computed again for the gradient.
    """
    total, report = torch.zeros((), device=head.device), Report3([], [], [], [])
    ids, hidden = model.token_ids(), batch.hidden[:, -head.shape[1] :]
    for step, output in enumerate(outputs):
        valid = layout.valid(step)
        target = hidden[layout.bases[valid] + step]
        parts = checkpoint(
            _step_loss, model, output[valid], target, head, ids, temperature, use_reentrant=False
        )
        ce, accept, known = parts
        total = total + gamma**step * ce / max(1, int(known))
        report.counts.append(len(target))
        report.known.append(int(known))
        report.ce.append(float(ce.detach()) / max(1, int(known)))
        report.accept.append(float(accept) / max(1, len(target)))
    return total, report


def _step_loss(
    model: Eagle3Model, drafted: Tensor, target: Tensor, head: Tensor, ids: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over rows: CE of the rows that count; 1 - TV of all rows; rows that count."""
    t = temperature or 1.0
    with torch.no_grad():
        p = ((target.to(head.dtype) @ head.T).float() / t).softmax(-1)
        best = p.argmax(-1)
        known = torch.isin(best, ids)
        p = p[:, ids]
        wanted = p / p.sum(-1, keepdim=True)
    log_q = (model.logits(drafted.float()) / t).log_softmax(-1)
    ce = -(wanted * log_q).sum(-1)[known].sum()
    accept = torch.minimum(p, log_q.detach().exp()).sum()
    return ce, accept, known.sum()
