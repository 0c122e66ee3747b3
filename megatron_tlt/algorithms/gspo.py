"""GSPO: importance ratio and clipping of whole responses (2507.18071, equations 5 to 7). Legend: T tokens."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from megatron_tlt.algorithms.advantages import Floats, Ints, standardised
from megatron_tlt.algorithms.base import Algorithm, LossInputs, RewardTable


class Gspo(Algorithm):
    """Group sequence policy optimisation.

    Every token carries its response's ratio and the weight 1/R, so the sum over a response's tokens is the
    response's single term. The engine/actor correction is taken over the response in the same way.
    """

    default_clip: ClassVar[tuple[float, float]] = (3e-4, 4e-4)

    def row_advantages(self, table: RewardTable, rewards: Floats) -> Floats:
        """(r - mean) / (std + eps) of the group (equation 6)."""
        return standardised(table.prompt_id, rewards, self.config.advantage_eps)

    def token_weight(self, length: int) -> float:
        """A response's tokens share one term."""
        return 1.0 / length

    def divisor(self, lengths: Ints) -> float:
        """Responses."""
        return float(len(lengths))

    def pooled(self, values: Tensor, inputs: LossInputs) -> Tensor:
        """[T] mean over the unmasked tokens of the same response: log of equation 7. Differentiable."""
        empty = values.new_zeros(inputs.num_segments)
        mask = inputs.mask.to(values.dtype)
        sums = empty.index_add(0, inputs.segments, values * mask)
        counts = empty.index_add(0, inputs.segments, mask).clamp(min=1.0)
        return (sums / counts)[inputs.segments]
