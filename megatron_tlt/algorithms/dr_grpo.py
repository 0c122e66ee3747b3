"""Dr.GRPO: GRPO without its length and difficulty biases (2503.20783, section 3.2)."""

from __future__ import annotations

from megatron_tlt.algorithms.advantages import Floats, Ints, centred
from megatron_tlt.algorithms.base import Algorithm, RewardTable


class DrGrpo(Algorithm):
    """GRPO done right: no division by the group's deviation, none by the response's own length."""

    def row_advantages(self, table: RewardTable, rewards: Floats) -> Floats:
        """r - mean of the group."""
        return centred(table.prompt_id, rewards)

    def divisor(self, lengths: Ints) -> float:
        """Responses times the generation budget: a constant, so no response gains by being long or short."""
        return float(len(lengths) * self.max_tokens)
