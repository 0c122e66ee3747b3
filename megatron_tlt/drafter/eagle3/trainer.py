"""`Eagle3Trainer`: `DrafterTrainer` for a drafter of kind eagle3."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.drafter.eagle3.loss import eagle3_loss
from megatron_tlt.drafter.trainer import Average, DrafterTrainer
from megatron_tlt.models.eagle.eagle3 import Eagle3Model
from megatron_tlt.models.eagle.pairs import PairBatch, PairLayout


class Eagle3Trainer(DrafterTrainer):
    """Trains layer, fc, norms and the drafter's own head. Of `drafter.loss` only `step_decay` applies."""

    def __init__(
        self,
        model: Eagle3Model,
        embed: Tensor,
        head: Tensor,
        section: DrafterSection,
        temperature: float = 1.0,
        average: Average | None = None,
    ):
        """As the base class; batches have `hidden` [T, 4H] (`FeatureDecoder`)."""
        super().__init__(model, embed, head, section, temperature, average)
        self._drafter = model

    def _loss(
        self, outputs: Sequence[Tensor], batch: PairBatch, layout: PairLayout, counts: Sequence[int] | None
    ) -> tuple[Tensor, dict[str, list[float]]]:
        assert counts is None, "shares of a batch are for training in idle time, which this kind has none of"
        w = self.weights
        loss, report = eagle3_loss(self._drafter, outputs, batch, layout, self.head, w.gamma, w.temperature)
        shares = [known / max(1, count) for known, count in zip(report.known, report.counts, strict=True)]
        return loss, {"known": shares, "ce": report.ce, "accept": report.accept}
