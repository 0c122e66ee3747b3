"""The loss of EAGLE drafters: the policy's hidden states (kind eagle) and its distributions.

For unrolled step j, over the bases that have it, with z = o W^T, through the policy's frozen LM head or, of kind
eagle3, norm and head of its own, and p, q the softmax of policy and drafter at the rollout temperature:

    gamma^j * mean( w_h * SmoothL1(o, h) + w_ce * CE(p, q) + w_tv * TV(p, q) )

SmoothL1 is a mean over the hidden size. It keeps long drafts on course: without it the drafter reads hidden states of
its own that no policy has, and acceptance falls from position to position. EAGLE-3 (2503.01840, section 3) leaves it
out. CE and TV: `drafters.loss`.

Legend: N rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from megatron_tlt.drafters.base import LossParts
from megatron_tlt.drafters.eagle.model import PairModel
from megatron_tlt.drafters.eagle.pairs import PairLayout
from megatron_tlt.drafters.loss import HeadLoss, LossInputs, PolicyRows


def draft_loss(
    model: PairModel, outputs: Sequence[Tensor], layout: PairLayout, given: LossInputs
) -> tuple[Tensor, LossParts]:
    """The loss (0-d, differentiable) of `PairModel.unroll`'s outputs [N, H], and its parts: `hidden` (SmoothL1, of
    models that imitate states), `ce`, `accept` (1 - TV).

    A step that no sequence is long enough for adds nothing. How sequences are packed does not matter: every term is a
    sum over rows divided by their number.
    """
    device, counts = given.head.device, given.counts
    bases = [layout.existing(step) for step in range(len(outputs))]
    targets = [layout.base_rows[of_step] + step for step, of_step in enumerate(bases)]
    per_row = 1.0 / np.maximum(1, [len(of_step) for of_step in bases] if counts is None else counts[: len(bases)])
    by_step = torch.tensor(per_row, dtype=torch.float32).to(device, non_blocking=True)
    policy = PolicyRows.of(given, model.token_ids(), targets, by_step)
    drafted = policy.sort([o.index_select(0, layout.here(of)) for o, of in zip(outputs, bases, strict=True)])
    own = model.own_head(policy.head)
    total, ce, accept = HeadLoss.apply(model.before_head(drafted), own, policy)  # type: ignore[no-untyped-call]
    of_rows = {"ce": ce, "accept": accept}
    if model.imitates_states:
        target = policy.states[policy.rows.at].float()
        near = smooth_l1_loss(drafted, target, reduction="none").mean(-1)
        total = total + given.hidden_weight * (policy.scale * near).sum()
        of_rows = {"hidden": near.detach(), **of_rows}
    return total, {name: list(policy.means(found, by_step)) for name, found in of_rows.items()}
