"""REINFORCE++: no groups; advantages are whitened over all tokens of the batch (2501.03262, section 3).

With `kl_in: reward` the return of token t is the response's reward minus `kl_coef` times the KL (k1) of
tokens t and later, so advantages differ within a response. Legend: R response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_tlt.algorithms.advantages import Floats, whitened_rows, whitened_tokens
from megatron_tlt.algorithms.base import Algorithm, ReduceSum, RewardTable
from megatron_tlt.types import TrainSequence


class ReinforcePp(Algorithm):
    """REINFORCE with PPO's clipping and global advantage normalisation; the loss is the mean over all tokens."""

    def row_advantages(self, table: RewardTable, rewards: Floats) -> Floats:
        """Rewards whitened over the batch's trained tokens."""
        return whitened_rows(rewards, table.length * self.trained(table), self.config.advantage_eps)

    def token_advantages(
        self,
        sequences: Sequence[TrainSequence],
        rows: Sequence[int],
        table: RewardTable,
        token_kl: Sequence[np.ndarray] | None,
        reduce_sum: ReduceSum,
    ) -> list[Floats]:
        """[R] advantages; collective with KL in the reward, since a rank has its own tokens' KL only."""
        if not self.needs_token_kl or token_kl is None:
            return super().token_advantages(sequences, rows, table, token_kl, reduce_sum)
        returns = [
            table.reward[row] - self.config.kl_weight * tail_sums(kl) for row, kl in zip(rows, token_kl, strict=True)
        ]
        trained = self.trained(table)
        counted = [s.trajectory.drawn & trained[row] for s, row in zip(sequences, rows, strict=True)]
        return whitened_tokens(returns, counted, self.config.advantage_eps, reduce_sum)


def tail_sums(values: np.ndarray) -> Floats:
    """[R] sum of this and all later values."""
    return np.cumsum(values[::-1], dtype=np.float64)[::-1]
