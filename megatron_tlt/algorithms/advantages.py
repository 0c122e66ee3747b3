"""Advantages from one reward a sample: group-relative baselines and whitening over the batch.

Pure numpy in float64, from the table that is the same on every rank. Legend: N samples, R response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def _group_deviations(prompt_id: Ints, rewards: Floats) -> tuple[Floats, Floats, Ints]:
    """(reward - mean, standard deviation, size) of every row's own group, each [N].

    The deviation is the sample one (n - 1), 0 for a group of one. The papers write only "std"; n - 1 is what
    the public implementations compute. The mean of equal rewards is that reward, to the bit.
    """
    _, group = np.unique(prompt_id, return_inverse=True)
    size = np.bincount(group)
    low = _group_range(group, rewards)[0][group]
    mean = low + (np.bincount(group, weights=rewards - low) / size)[group]
    deviation = rewards - mean
    spread = np.bincount(group, weights=deviation**2)
    std = np.sqrt(spread / np.maximum(size - 1, 1))
    return deviation, std[group], size[group].astype(np.int64)


def centred(prompt_id: Ints, rewards: Floats) -> Floats:
    """Reward minus the group's mean, [N] (Dr.GRPO, 2503.20783, section 3.2)."""
    return _group_deviations(prompt_id, rewards)[0]


def standardised(prompt_id: Ints, rewards: Floats, eps: float) -> Floats:
    """(reward - mean) / (std + eps) within the group, [N] (GRPO, 2402.03300, section 4.1.2)."""
    deviation, std, _ = _group_deviations(prompt_id, rewards)
    return deviation / (std + eps)


def leave_one_out(prompt_id: Ints, rewards: Floats) -> Floats:
    """Reward minus the mean of the *other* responses to the prompt, [N] (RLOO, 2402.14740, equation 7).

    A response alone in its group has no baseline and gets 0, for its deviation is 0.
    """
    deviation, _, size = _group_deviations(prompt_id, rewards)
    # r - (n * mean - r) / (n - 1) = (r - mean) * n / (n - 1)
    return deviation * size / np.maximum(size - 1, 1)


def share_of_equal_groups(prompt_id: Ints, rewards: Floats) -> float:
    """Share of groups whose rewards are all the same: their group-relative advantages are zero."""
    if not len(rewards):
        return 0.0
    _, group = np.unique(prompt_id, return_inverse=True)
    low, high = _group_range(group, rewards)
    return float(np.mean(low == high))


def _group_range(group: Ints, rewards: Floats) -> tuple[Floats, Floats]:
    """(least, greatest) reward of every group; `group` numbers the groups from 0, [N]."""
    count = group.max(initial=-1) + 1
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low, group, rewards)
    np.maximum.at(high, group, rewards)
    return low, high


def whitened_rows(rewards: Floats, tokens: Ints, eps: float) -> Floats:
    """Rewards whitened over all tokens of the batch, [N]; row i counts `tokens[i]` times.

    For REINFORCE++ (2501.03262, section 3) where every token of a response has the response's reward. Where all that
    count are equal their values are 0, to the bit.
    """
    total, counted = tokens.sum(), rewards[tokens > 0]
    if not total:
        return np.zeros_like(rewards)
    low = counted.min()
    mean = low + ((rewards - low) * tokens).sum() / total
    std = np.sqrt(((rewards - mean) ** 2 * tokens).sum() / total)
    return (rewards - mean) / (std + eps)


def whitened_tokens(
    values: Sequence[Floats],
    counted: Sequence[npt.NDArray[np.bool_]],
    eps: float,
    reduce_sum: Callable[[Floats], Floats],
) -> list[Floats]:
    """This rank's per-token values ([R] each) whitened over all tokens of all ranks.

    `counted[i]`, [R]: which tokens of sequence i enter mean and deviation. Collective: `reduce_sum` adds an array
    over ranks and is called exactly twice on each, also on one without sequences.
    """
    chosen = [v[used] for v, used in zip(values, counted, strict=True)]
    local = np.array([sum(float(v.sum()) for v in chosen), float(sum(len(v) for v in chosen))])
    total, count = reduce_sum(local)
    mean = total / max(count, 1.0)
    squares = np.array([sum(float(((v - mean) ** 2).sum()) for v in chosen)])
    std = np.sqrt(reduce_sum(squares)[0] / max(count, 1.0))
    return [(v - mean) / (std + eps) for v in values]
