"""GSPO: importance ratio and clipping of whole responses (2507.18071, equations 5 to 7). Legend: T tokens."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from megatron_tlt.algorithms.base import LossInputs
from megatron_tlt.algorithms.grpo import Grpo


class Gspo(Grpo):
    """Group sequence policy optimisation: GRPO's advantages (equation 6), with one ratio for a whole response.

    Every token carries that ratio and GRPO's weight 1/R, so the sum over a response's tokens is the response's single
    term. The engine/actor correction is taken over the response in the same way.
    """

    default_clip: ClassVar[tuple[float, float]] = (3e-4, 4e-4)

    def pooled(self, values: Tensor, inputs: LossInputs) -> Tensor:
        """[T] mean over the unmasked tokens of the same response: log of equation 7. Differentiable."""
        empty = values.new_zeros(inputs.num_segments)
        mask = inputs.mask.to(values.dtype)
        sums = empty.index_add(0, inputs.segments, values * mask)
        counts = empty.index_add(0, inputs.segments, mask).clamp(min=1.0)
        return (sums / counts)[inputs.segments]
