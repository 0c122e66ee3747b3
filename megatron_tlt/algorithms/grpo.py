"""GRPO: group-standardised rewards, mean over a response's tokens, then over responses (2402.03300, eq. 3)."""

from __future__ import annotations

from megatron_tlt.algorithms.advantages import Floats, Ints, standardised
from megatron_tlt.algorithms.base import Algorithm, RewardTable


class GroupRelative(Algorithm):
    """GRPO's advantages; the loss is the mean over all tokens."""

    def row_advantages(self, table: RewardTable, rewards: Floats) -> Floats:
        """(r - mean) / (std + eps) of the group."""
        return standardised(table.prompt_id, rewards, self.config.advantage_eps)


class Grpo(GroupRelative):
    """Group relative policy optimisation."""

    def token_weight(self, length: int) -> float:
        """Every response weighs the same, however long."""
        return 1.0 / length

    def divisor(self, lengths: Ints) -> float:
        """Responses."""
        return float(len(lengths))
