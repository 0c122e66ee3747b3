"""DAPO: clip-higher and a mean over all tokens of the batch (2503.14476, equation 8).

Its other parts are switches of every algorithm: `dynamic_sampling` (equation 11), `overlong_buffer`
(equation 13), `mask_truncated` (section 3.4).
"""

from __future__ import annotations

from typing import ClassVar

from megatron_tlt.algorithms.grpo import GroupRelative


class Dapo(GroupRelative):
    """Decoupled clip and dynamic sampling policy optimisation: every token weighs the same, so a long response weighs
    more than a short one. The advantages are GRPO's (equation 9).
    """

    default_clip: ClassVar[tuple[float, float]] = (0.2, 0.28)
