"""The loss of EAGLE drafters: the policy's hidden states (kind eagle) and its distributions.

For unrolled step j, over the bases that have it, with z = o W^T, through the policy's frozen LM head or, of kind
eagle3, norm and head of its own, and p, q the softmax of policy and drafter at the rollout temperature:

    gamma^j * mean( w_h * SmoothL1(o, h) + w_ce * CE(p, q) + w_tv * TV(p, q) )

SmoothL1 is a mean over the hidden size. It keeps long drafts on course: without it the drafter reads hidden states of
its own that no policy has, and acceptance falls from position to position. EAGLE-3 (2503.01840, section 3) leaves it
out. CE and TV: `drafter.loss.HeadLoss`.

Legend: N rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from megatron_tlt.config.drafter import DrafterLossSection
from megatron_tlt.drafter.kinds.base import LossParts
from megatron_tlt.drafter.loss import HeadLoss
from megatron_tlt.models.drafters import DraftBatch
from megatron_tlt.models.eagle.model import PairModel
from megatron_tlt.models.eagle.pairs import PairLayout


def draft_loss(
    model: PairModel,
    outputs: Sequence[Tensor],
    batch: DraftBatch,
    layout: PairLayout,
    head: Tensor,
    loss: DrafterLossSection,
    temperature: float = 1.0,
    counts: Sequence[int] | None = None,
) -> tuple[Tensor, LossParts]:
    """The loss (0-d, differentiable) of `PairModel.unroll`'s outputs [N, H], and its parts: `hidden` (SmoothL1, of
    models that imitate states), `ce`, `accept` (1 - TV).

    The last H columns of `batch.hidden` are the policy's final hidden state; head [V, H] is the policy's. 1 - TV is
    over the whole vocabulary: a token outside the drafter's cannot be accepted. A step that no sequence is long enough
    for adds nothing. How sequences are packed does not matter: every term is a sum over rows divided by their number,
    or by `counts` where the batch is a share of a larger one.
    """
    total = torch.zeros((), device=head.device)
    parts: LossParts = {}
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
            parts.setdefault(name, []).append(mean.detach())
    return total, parts
