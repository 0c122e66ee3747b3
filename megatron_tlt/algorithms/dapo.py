"""DAPO: clip-higher and a mean over all tokens of the batch (2503.14476, equation 8).

Its other parts are switches of every algorithm: `dynamic_sampling` (equation 11), `overlong_buffer`
(equation 13), `mask_truncated` (section 3.4).
"""

from __future__ import annotations

from typing import ClassVar

from megatron_tlt.algorithms.advantages import Floats, standardised
from megatron_tlt.algorithms.base import Algorithm, RewardTable


class Dapo(Algorithm):
    """Decoupled clip and dynamic sampling policy optimisation: every token weighs the same, so a long response weighs
    more than a short one.
    """

    default_clip: ClassVar[tuple[float, float]] = (0.2, 0.28)

    def row_advantages(self, table: RewardTable, rewards: Floats) -> Floats:
        """(r - mean) / (std + eps) of the group (equation 9)."""
        return standardised(table.prompt_id, rewards, self.config.advantage_eps)
