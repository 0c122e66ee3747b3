"""The loss of an EAGLE-3 drafter: the policy's distribution over the drafter's vocabulary.

For unrolled step j, over the bases that have it and whose most likely token of the policy is in the drafter's
vocabulary, with p the policy's probabilities of the drafter's tokens, renormalised, and q the drafter's:

    gamma^j * mean( CE(p, q) )

(EAGLE-3, 2503.01840, section 3: no distance to hidden states; which rows count when the vocabulary is reduced is
SpecForge's rule.) Rows whose most likely token is outside would teach the drafter the policy's second choice.

Legend: N rows, H hidden size, V vocabulary, Vd the drafter's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_tlt.drafter.loss import LossParts
from megatron_tlt.models.eagle.eagle3 import Eagle3Model
from megatron_tlt.models.eagle.pairs import PairBatch, PairLayout


def eagle3_loss(
    model: Eagle3Model,
    outputs: Sequence[Tensor],
    batch: PairBatch,
    layout: PairLayout,
    head: Tensor,
    gamma: float = 0.8,
    temperature: float = 1.0,
) -> tuple[Tensor, LossParts]:
    """The loss (0-d) of `Eagle3Model.unroll`'s outputs and its parts by step: `known`, the share of rows that count;
    `ce`, their mean cross entropy; `accept`, the mean 1 - TV of all rows.

    The last H columns of `batch.hidden` are the policy's state after its final norm; head [V, H] is the policy's.
    1 - TV is taken over the whole vocabulary: a token outside the drafter's cannot be accepted. One step's
    [N, Vd] live at a time: they are computed again for the gradient.
    """
    total = torch.zeros((), device=head.device)
    parts: LossParts = {"known": [], "ce": [], "accept": []}
    ids, hidden = model.token_ids(), batch.hidden[:, -head.shape[1] :]
    for step, output in enumerate(outputs):
        valid = layout.existing(step)
        target = hidden[layout.bases[valid] + step]
        ce, accept, known = checkpoint(
            _step_loss, model, output[valid], target, head, ids, temperature or 1.0, use_reentrant=False
        )
        count, rows = max(1, int(known)), max(1, len(target))
        total = total + gamma**step * ce / count
        for values, value in zip(parts.values(), (int(known) / rows, ce / count, accept / rows), strict=True):
            values.append(torch.as_tensor(value, dtype=torch.float32, device=head.device).detach())
    return total, parts


def _step_loss(
    model: Eagle3Model, drafted: Tensor, target: Tensor, head: Tensor, ids: Tensor, t: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over rows at temperature `t`: CE of the rows that count; 1 - TV of all rows; rows that count."""
    with torch.no_grad():
        p = ((target.to(head.dtype) @ head.T).float() / t).softmax(-1)
        known = torch.isin(p.argmax(-1), ids)
        p = p[:, ids]
        wanted = p / p.sum(-1, keepdim=True)
    log_q = (model.logits(drafted.float()) / t).log_softmax(-1)
    ce = -(wanted * log_q).sum(-1)[known].sum()
    accept = torch.minimum(p, log_q.detach().exp()).sum()
    return ce, accept, known.sum()
