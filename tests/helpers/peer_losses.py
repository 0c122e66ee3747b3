"""Losses of TRL, verl, NeMo-RL and OpenRLHF in words of our own, which ours are compared with.

Sources: TRL 1.16.0, verl 0.9.1, OpenRLHF 0.11.2, NeMo-RL at 00925dd (advantages) and 006907a (loss). Each function
names the file and function whose formula it is, as these projects compute it on a padded batch; constants are theirs.

Legend: B responses, T tokens of the longest response.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """A padded batch of responses, float64 where not said otherwise."""

    prompt: Tensor  # int64 [B]
    reward: Tensor  # [B]
    lengths: Tensor  # int64 [B], tokens of the response, drawn and given
    mask: Tensor  # [B, T], 1 where the policy drew
    truncated: Tensor  # bool [B]
    logp: Tensor  # [B, T], with gradient
    old: Tensor  # [B, T]
    rollout: Tensor  # [B, T], the engine's
    ref: Tensor  # [B, T]

    @property
    def group(self) -> Tensor:
        """bool [B, B]: which responses have one prompt."""
        return self.prompt[:, None] == self.prompt[None, :]


# -- shared pieces: sums that every project writes alike ---------------------------------------------------------------


def group_mean(b: Batch) -> Tensor:
    """[B] mean reward of every response's group."""
    return (b.group * b.reward).sum(1) / b.group.sum(1)


def group_std(b: Batch) -> Tensor:
    """[B] standard deviation over n - 1, as `torch.std`."""
    squares = (b.group * (b.reward[None, :] - group_mean(b)[:, None]) ** 2).sum(1)
    return (squares / (b.group.sum(1) - 1)).sqrt()


def token_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over all tokens of the batch."""
    return (values * mask).sum() / mask.sum()


def response_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over responses of the mean over their tokens; responses without a token do not count."""
    each = (values * mask).sum(1) / mask.sum(1).clamp(min=1)
    return each.sum() / (mask.sum(1) > 0).sum()


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """PPO's pessimistic surrogate as a loss."""
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))


# -- TRL: trl/trainer/grpo_trainer.py ----------------------------------------------------------------------------------


def trl_advantages(b: Batch, scale: bool = True) -> Tensor:
    """[B] `_generate_and_score_completions` with `scale_rewards` "group", or "none"."""
    centred = b.reward - group_mean(b)
    return centred / (group_std(b) + 1e-4) if scale else centred


def trl(
    b: Batch,
    loss_type: Literal["grpo", "dapo", "dr_grpo"],
    clip: tuple[float, float] = (0.2, 0.2),
    level: Literal["token", "sequence"] = "token",
    beta: float = 0.0,
    cap: float | None = None,
    max_tokens: int = 0,
) -> Tensor:
    """`_compute_loss`; `cap`: of `importance_sampling_ratio`, the truncated token ratio of trainer and vLLM."""
    ratio = b.logp - b.old
    if level == "sequence":
        ratio = ((ratio * b.mask).sum(1) / b.mask.sum(1))[:, None]
    loss = clipped(ratio.exp(), trl_advantages(b, loss_type != "dr_grpo")[:, None], *clip).expand_as(b.mask)
    if cap is not None:
        loss = loss * (b.old - b.rollout).exp().clamp(max=cap)
    loss = loss + beta * ((b.ref - b.logp).exp() - (b.ref - b.logp) - 1)
    if loss_type == "dr_grpo":
        return (loss * b.mask).sum() / (len(b.mask) * max_tokens)
    return token_mean(loss, b.mask) if loss_type == "dapo" else response_mean(loss, b.mask)


# -- verl: verl/trainer/ppo/core_algos.py ------------------------------------------------------------------------------


def verl_advantages(b: Batch, estimator: Literal["grpo", "dr_grpo", "rloo"]) -> Tensor:
    """[B] `compute_grpo_outcome_advantage` (`norm_adv_by_std_in_grpo` or not), `compute_rloo_outcome_advantage`."""
    if estimator == "rloo":
        n = b.group.sum(1)
        return b.reward * n / (n - 1) - group_mean(b) * n / (n - 1)
    centred = b.reward - group_mean(b)
    return centred / (group_std(b) + 1e-6) if estimator == "grpo" else centred


def verl(
    b: Batch,
    estimator: Literal["grpo", "dr_grpo", "rloo"],
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"],
    clip: tuple[float, float] = (0.2, 0.2),
    sequence_ratio: bool = False,
    kl_coef: float = 0.0,
    max_tokens: int = 0,
) -> Tensor:
    """`compute_policy_loss_vanilla` or, with `sequence_ratio`, `compute_policy_loss_gspo`; `agg_loss`, with
    `loss_scale_factor` = `max_tokens`; `kl_penalty` "low_var_kl" in the loss.
    """
    advantages = verl_advantages(b, estimator)[:, None]
    log_ratio = (b.logp - b.old).clamp(-20, 20)
    if sequence_ratio:  # the value is the response's, the gradient goes through the token
        whole = ((b.logp - b.old) * b.mask).sum(1) / b.mask.sum(1)
        log_ratio = b.logp - b.logp.detach() + whole.detach()[:, None]
    loss = clipped(log_ratio.exp(), advantages, *clip)
    if not sequence_ratio:
        loss = torch.where(advantages < 0, torch.minimum(loss, -3.0 * advantages), loss)  # dual clip
    log_r = (b.ref - b.logp).clamp(-20, 20)
    loss = loss + kl_coef * (log_r.exp() - log_r - 1).clamp(-10, 10)
    if aggregation == "token-mean":
        return token_mean(loss, b.mask)
    if aggregation == "seq-mean-token-mean":
        return response_mean(loss, b.mask)
    return (loss * b.mask).sum(1).mean() / (max_tokens if aggregation.endswith("norm") else 1)


# -- NeMo-RL: nemo_rl/algorithms/advantage_estimator.py, loss/loss_functions.py ----------------------------------------


def nemo_advantages(b: Batch, estimator: Literal["grpo", "reinforce_plus_plus"]) -> Tensor:
    """[B, T] `GRPOAdvantageEstimator` without leave-one-out, `ReinforcePlusPlusAdvantageEstimator` without baseline."""
    if estimator == "reinforce_plus_plus":
        return whitened(b.reward[:, None].expand_as(b.mask), b.mask)
    n, mean = b.group.sum(1), group_mean(b)
    square = (b.group * b.reward**2).sum(1) / n
    std = ((square - mean**2).clamp(min=0) * n / (n - 1)).sqrt()
    centred = b.reward - mean
    return torch.where(std > 1e-7, centred / (std + 1e-6), centred)[:, None].expand_as(b.mask)


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    """[B, T] less their mean, over their standard deviation over n, both of the tokens of `mask`."""
    mean = token_mean(values, mask)
    return (values - mean) * token_mean((values - mean) ** 2, mask).clamp(min=1e-8).rsqrt()


def nemo(
    b: Batch,
    estimator: Literal["grpo", "reinforce_plus_plus"],
    token_level: bool,
    clip: tuple[float, float] = (0.2, 0.2),
    sequence_ratio: bool = False,
    cap: float | None = None,
    drop_truncated: bool = False,
) -> Tensor:
    """`ClippedPGLossFn` without KL; `cap`: truncated importance sampling, "tis"; `drop_truncated`: overlong filtering,
    by `sample_mask`.
    """
    mask = b.mask * (~b.truncated)[:, None] if drop_truncated else b.mask
    ratio = b.logp - b.old
    if sequence_ratio:
        ratio = ((ratio * b.mask).sum(1) / b.mask.sum(1))[:, None].expand_as(b.mask)
    loss = clipped(ratio.exp(), nemo_advantages(b, estimator), *clip)
    if cap is not None:
        loss = loss * (b.old - b.rollout).exp().clamp(max=cap)
    return token_mean(loss, mask) if token_level else response_mean(loss, mask)


# -- OpenRLHF: openrlhf/trainer/ppo_utils/experience_maker.py, openrlhf/models/{loss,utils}.py -------------------------


def openrlhf_advantages(b: Batch, estimator: Literal["group_norm", "reinforce"], kl: float) -> Tensor:
    """[B, T] `compute_advantages_and_returns`, `compute_reward` (k1, in the reward), `get_cumulative_returns`."""
    reward = b.reward
    if estimator == "group_norm":
        reward = (reward - group_mean(b)) / (group_std(b) + 1e-9)
    places = torch.arange(b.mask.shape[1]) * b.mask
    last = torch.nn.functional.one_hot(places.argmax(1), b.mask.shape[1])
    each = (reward[:, None] * last - kl * (b.old - b.ref)) * b.mask
    returns = each.flip(1).cumsum(1).flip(1)
    return whitened(returns, b.mask) if estimator == "reinforce" else returns


def openrlhf(
    b: Batch,
    estimator: Literal["group_norm", "reinforce"],
    token_level: bool,
    clip: tuple[float, float] = (0.2, 0.2),
    sequence_ratio: bool = False,
    kl_coef: float = 0.0,
) -> Tensor:
    """`PolicyLoss` of type "ppo" or, with `sequence_ratio`, "gspo", with the KL in the reward."""
    ratio = (b.logp - b.old).clamp(-20, 20)
    if sequence_ratio:
        ratio = ((ratio * b.mask).sum(1) / b.mask.sum(1))[:, None]
    loss = clipped(ratio.exp(), openrlhf_advantages(b, estimator, kl_coef), *clip)
    return token_mean(loss, b.mask) if token_level else response_mean(loss, b.mask)
