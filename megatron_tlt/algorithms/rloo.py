"""RLOO: REINFORCE with a leave-one-out baseline; a response is one action (2402.14740, section 2.3.2).

The gradient is the mean over responses of (r_i - mean of the others) times the gradient of log p(response),
which is a *sum* over tokens: RLOO divides by no length. In the first mini-batch the clipped token ratio is
1 and its gradient is exactly that; clipping only acts where `mini_batches` > 1 makes later updates
off-policy.
"""

from __future__ import annotations

from megatron_tlt.algorithms.advantages import Floats, Ints, leave_one_out
from megatron_tlt.algorithms.base import Algorithm, RewardTable


class Rloo(Algorithm):
    """REINFORCE leave-one-out. The paper puts the KL into the reward: `kl_in: reward`."""

    def row_advantages(self, table: RewardTable, rewards: Floats) -> Floats:
        """r minus the mean of the other responses."""
        return leave_one_out(table.prompt_id, rewards)

    def divisor(self, lengths: Ints) -> float:
        """Responses."""
        return float(len(lengths))
