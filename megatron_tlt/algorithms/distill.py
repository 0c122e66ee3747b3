"""On-policy distillation: the reverse KL to a teacher, token by token, at the policy's own responses.

The objective is KL(policy || teacher) at the contexts that the policy reaches: GKD (2306.13649) with all data on-policy
and the reverse KL, MiniLLM (2306.08543). Of the sum over the vocabulary only the drawn token is taken, whose log-ratio
is an unbiased estimate (k1). Its negative is the token's advantage, with discount 0, as in "On-Policy Distillation"
(Thinking Machines Lab, 2025): a token answers for its own context and not for the contexts that follow from it. The
gradient at the first update is that of a KL term of the loss with `kl_estimator: k2`; the advantages are clipped and
corrected besides, as those of rewards.

Legend: T response tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from megatron_tlt.algorithms.base import LossInputs
from megatron_tlt.algorithms.grpo import GroupRelative


class Distill(GroupRelative):
    """Per-token advantages A - kl_coef * (log policy - log teacher); A is GRPO's, 0 where all rewards are equal. The
    loss is the mean over all contexts of the batch.
    """

    @property
    def has_kl_loss(self) -> bool:
        """Never: the KL is part of the advantages."""
        return False

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """The clipped surrogate of the distillation advantages; `teacher_kl` is their sum of k1 estimates. Pure.

        The policy's log-probs in the advantage are those before the update (`old_logprobs`), without gradient.
        """
        x = inputs.cleaned()
        assert x.ref_logprobs is not None, "the teacher's log-probs"
        old = x.logprobs.detach() if x.old_logprobs is None else x.old_logprobs
        reverse_kl = old - x.ref_logprobs
        advantages = x.advantages - self.config.kl_weight * reverse_kl
        value, metrics = super().loss(replace(x, advantages=advantages))
        return value, metrics | {"teacher_kl": (reverse_kl * x.mask).sum()}
