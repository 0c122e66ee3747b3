"""The common part of all algorithms: the step's table, the loss's inputs, clipping, KL, corrections, metrics.

An algorithm's own file defines how a reward becomes an advantage and, where the loss is not the mean over all tokens,
how tokens are weighed within their response and the divisor of the sum. Legend: N samples of the step over all ranks,
R response tokens of one sample, T response tokens of one packed micro-batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_tlt.algorithms.advantages import Floats, Ints, share_of_equal_groups
from megatron_tlt.algorithms.correction import importance_weights, mismatch_sums
from megatron_tlt.algorithms.kl import LOG_RATIO_LIMIT, k3, kl_estimate
from megatron_tlt.config.algorithm import AlgorithmSection
from megatron_tlt.types import SampleGroup, TrainSequence

ReduceSum = Callable[[Floats], Floats]


@dataclass(frozen=True)
class RewardTable:
    """One row a sample, the step over all ranks, sorted by (prompt_id, sample_index), equal on every rank."""

    prompt_id: Ints  # [N]
    sample_index: Ints  # [N]
    reward: Floats  # [N], after shaping
    length: Ints  # [N], response tokens that the policy drew
    truncated: npt.NDArray[np.bool_]  # [N], a limit has ended it (`Sample.is_truncated`)
    aborted: npt.NDArray[np.bool_]  # [N], its environment failed: no loss, and no part in others' advantages
    kl_sum: Floats  # [N], sum of the sample's per-token KL; zeros when unused

    def valid(self) -> RewardTable:
        """The rows that are not aborted."""
        return RewardTable(**{name: column[~self.aborted] for name, column in vars(self).items()})

    def row_of(self) -> dict[tuple[int, int], int]:
        """Row by (prompt_id, sample_index)."""
        keys = zip(self.prompt_id.tolist(), self.sample_index.tolist(), strict=True)
        return {key: row for row, key in enumerate(keys)}


@dataclass(frozen=True)
class LossInputs:
    """The response tokens of one packed micro-batch, flat; responses are whole, never split over micro-batches.

    Rows with mask 0 may hold anything (also inf and NaN) and count for nothing.
    """

    logprobs: Tensor  # [T], with gradient
    old_logprobs: Tensor | None  # [T], before the first update of the step; None: equal to logprobs
    rollout_logprobs: Tensor  # [T], the engine's; NaN where it has none
    ref_logprobs: Tensor | None  # [T], the frozen reference's or the teacher's
    entropy: Tensor | None  # [T]
    advantages: Tensor  # [T]
    mask: Tensor  # [T], 1 or 0
    weights: Tensor  # [T], `TrainSequence.weight` of the token's response
    segments: Tensor  # int64 [T], which response a token belongs to
    num_segments: int

    def cleaned(self) -> LossInputs:
        """The same with zeros in masked rows, so that inf * 0 cannot make a NaN, forward or backward."""
        cleaned: dict[str, Any] = {
            name: torch.where(self.mask > 0, value, torch.zeros_like(value))
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **cleaned)


class Algorithm(ABC):
    """A policy-gradient algorithm; pure but for `assign`, which fills in sequences."""

    default_clip: ClassVar[tuple[float, float]] = (0.2, 0.2)

    def __init__(self, config: AlgorithmSection, max_tokens: int, has_engine_logprobs: bool = True):
        """`has_engine_logprobs`: the engine gives the log-probs of its responses; without them none are corrected."""
        low, high = self.default_clip
        self.config, self.max_tokens, self._has_engine_logprobs = config, max_tokens, has_engine_logprobs
        self.clip_low = low if config.ratio_clip_low is None else config.ratio_clip_low
        self.clip_high = high if config.ratio_clip_high is None else config.ratio_clip_high

    # Defined by each algorithm.

    @abstractmethod
    def row_advantages(self, table: RewardTable, rewards: Floats) -> Floats:
        """[N] advantages from [N] rewards (shaped, minus KL where it is part of the reward). Pure."""

    def token_weight(self, length: int) -> float:
        """Factor of every token's loss in a response of `length` > 0 tokens: all weigh the same, unless overridden."""
        return 1.0

    def divisor(self, lengths: Ints) -> float:
        """The divisor of the loss sum over responses of these lengths: their tokens, unless overridden."""
        return float(lengths.sum())

    def pooled(self, values: Tensor, inputs: LossInputs) -> Tensor:
        """[T] log-ratios as the importance ratio sees them: by token, unless overridden. Differentiable."""
        return values

    # Used by the loop and the actor.

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen reference policy, or a teacher in its place, must be kept."""
        return self.config.kl_weight > 0

    @property
    def needs_token_kl(self) -> bool:
        """Whether `assign` needs every token's KL to the reference."""
        return self.needs_reference and self.config.kl_in == "reward"

    @property
    def has_kl_loss(self) -> bool:
        """Whether the KL to the reference is a term of the loss of its own."""
        return self.needs_reference and self.config.kl_in == "loss"

    @property
    def zero_advantage_has_no_gradient(self) -> bool:
        """Whether a response's loss is made of its advantages only: no KL in the loss, no entropy bonus."""
        return not self.config.entropy_coef and (not self.needs_reference or self.needs_token_kl)

    def shaped(self, group: SampleGroup) -> list[float]:
        """Rewards of a group, minus the penalty on overlong responses (DAPO, 2503.14476, equation 13). Pure."""
        pairs = zip(group.rewards, group.samples, strict=True)
        return [reward.value - self.overlong(len(sample.token_ids)) for reward, sample in pairs]

    def overlong(self, length: int) -> float:
        """Penalty >= 0 on a response of `length` tokens: 0 up to max_tokens - buffer, then growing."""
        buffer = self.config.overlong_buffer
        if not buffer:
            return 0.0
        excess = (length - (self.max_tokens - buffer)) / buffer
        return min(max(excess, 0.0), 1.0)

    def keep_group(self, group: SampleGroup) -> bool:
        """Whether not all responses are right and not all wrong (DAPO, equation 11), by their rewards before overlong
        shaping; always true without dynamic sampling.
        """
        return not self.config.dynamic_sampling or len({reward.value for reward in group.judged()}) > 1

    def trained(self, table: RewardTable) -> npt.NDArray[np.bool_]:
        """[N] whether a row takes part in the loss."""
        masked = table.truncated if self.config.mask_truncated else np.zeros_like(table.truncated)
        trained: npt.NDArray[np.bool_] = (table.length > 0) & ~masked & ~table.aborted
        return trained

    def advantages(self, table: RewardTable, rewards: Floats) -> Floats:
        """[N] `row_advantages` among the rows that are not aborted; 0 of those that are. Pure."""
        values = np.zeros(len(rewards))
        values[~table.aborted] = self.row_advantages(table.valid(), rewards[~table.aborted])
        return values

    def has_gradient(self, table: RewardTable) -> npt.NDArray[np.bool_]:
        """[N] whether a row must be run through the update; the others' gradients are exactly zero.

        Rows without are counted by `denominator` all the same. Every row that is not aborted has one as long as its
        advantages depend on log-probs that are not there yet (KL in the reward). Pure.
        """
        if self.needs_token_kl:
            return ~table.aborted
        trained = self.trained(table)
        if not self.zero_advantage_has_no_gradient:
            return trained
        # As the loss sees them, in fp32. NaN is not zero: a broken reward must reach the guard of the update.
        return trained & (self.advantages(table, table.reward).astype(np.float32) != 0)

    def denominator(self, table: RewardTable, members: Ints) -> float:
        """World-wide divisor of the loss sum over the rows `members`; 0 if none of them is trained."""
        lengths = table.length[members][self.trained(table)[members]]
        return float(self.divisor(lengths)) if len(lengths) else 0.0

    def assign(
        self,
        sequences: Sequence[TrainSequence],
        table: RewardTable,
        token_kl: Sequence[np.ndarray] | None,
        reduce_sum: ReduceSum,
    ) -> dict[str, float]:
        """Sets `advantages` and `weight` of this rank's sequences, and multiplies their `loss_mask` by whether they are
        trained; returns metrics of the step.

        `token_kl[i]`, [R], belongs to sequence i. `reduce_sum` adds a float64 array over data-parallel
        ranks; all of them must call `assign` together.
        """
        row_of = table.row_of()
        rows = [row_of[s.trajectory.prompt_id, s.trajectory.sample_index] for s in sequences]
        trained = self.trained(table)
        values = self.token_advantages(sequences, rows, table, token_kl, reduce_sum)
        for sequence, row, advantages in zip(sequences, rows, values, strict=True):
            length = int(table.length[row])
            sequence.advantages = advantages.astype(np.float32)
            sequence.loss_mask = sequence.loss_mask * np.float32(trained[row])
            sequence.weight = self.token_weight(length) if length else 0.0
        return self.table_metrics(table)

    def token_advantages(
        self,
        sequences: Sequence[TrainSequence],
        rows: Sequence[int],
        table: RewardTable,
        token_kl: Sequence[np.ndarray] | None,
        reduce_sum: ReduceSum,
    ) -> list[Floats]:
        """[R] advantages of every sequence; sequence i is row `rows[i]`. Collective where overridden."""
        rewards = table.reward - self.config.kl_weight * table.kl_sum if self.needs_token_kl else table.reward
        advantages = self.advantages(table, rewards)
        pairs = zip(sequences, rows, strict=True)
        return [np.full(len(s.loss_mask), advantages[row]) for s, row in pairs]

    def table_metrics(self, table: RewardTable) -> dict[str, float]:
        """Metrics of the step that follow from the table alone."""
        valid = table.valid()
        if not len(valid.reward):
            return {}
        kl = float(valid.kl_sum.sum() / max(valid.length.sum(), 1))
        return {
            "reward/equal_groups": share_of_equal_groups(valid.prompt_id, valid.reward),
            **({"reward/kl": kl} if self.needs_token_kl else {}),
            "loss/masked_samples": float(1.0 - self.trained(table).mean()),
        }

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss sum (0-d, before the denominator) and sums over unmasked tokens for the metrics. Pure.

        The clipped surrogate of PPO (1707.06347, equation 7), times the engine/actor importance weight, plus
        `kl_coef` times the KL, minus `entropy_coef` times the entropy. A metric ending in `_max` is a
        maximum.
        """
        x = inputs.cleaned()
        current = x.logprobs.detach()
        old = current if x.old_logprobs is None else x.old_logprobs
        weights = x.weights * x.mask
        correction, of_engine = self._correction(x, old)
        ratio = self.pooled(x.logprobs - old, x).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        clipped = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        surrogate = torch.minimum(ratio * x.advantages, clipped * x.advantages)
        value = -(weights * correction * surrogate).sum()
        extra, metrics = self._regularisers(x, weights)
        too_low = (ratio.detach() < 1.0 - self.clip_low) & (x.advantages < 0)
        too_high = (ratio.detach() > 1.0 + self.clip_high) & (x.advantages > 0)
        metrics |= {
            "clip_low": (too_low * x.mask).sum(),
            "clip_high": (too_high * x.mask).sum(),
            "policy_kl": (k3(current - old) * x.mask).sum(),
            **of_engine,
        }
        return value + extra, {name: total.detach() for name, total in metrics.items()}

    def _correction(self, x: LossInputs, old: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """[T] importance weights from the engine to the actor, and metric sums of their distance; ones and none where
        the engine has no log-probs, for the actor would be compared with itself.
        """
        if not self._has_engine_logprobs:
            return torch.ones_like(old), {}
        mismatch, cap = old - x.rollout_logprobs, self.config.importance_cap
        weights = importance_weights(self.pooled(mismatch, x), cap)
        return weights, mismatch_sums(mismatch, weights, x.mask, cap)

    def _regularisers(self, x: LossInputs, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """KL and entropy terms of the loss sum (0-d), and their metric sums."""
        value, metrics = x.logprobs.new_zeros(()), {}
        if self.has_kl_loss:
            assert x.ref_logprobs is not None
            kl = kl_estimate(x.logprobs, x.ref_logprobs, self.config.kl_estimator)
            value = value + self.config.kl_weight * (weights * kl).sum()
            metrics["kl_ref"] = (k3(x.ref_logprobs - x.logprobs.detach()) * x.mask).sum()
        if self.config.entropy_coef:
            assert x.entropy is not None
            value = value - self.config.entropy_coef * (weights * x.entropy).sum()
        return value, metrics
