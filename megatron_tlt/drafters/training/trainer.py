"""`DrafterTrainer`: Adam on a drafter, one bounded step at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.config.lr_schedule import LearningRate
from megatron_tlt.drafters.loss import LossInputs
from megatron_tlt.drafters.model import DraftBatch, DrafterModel
from megatron_tlt.drafters.registry import KINDS
from megatron_tlt.drafters.training.training_state import WITHOUT_MEAN, TrainingState
from megatron_tlt.errors import DrafterError
from megatron_tlt.models.decoders.base import DTYPES

_CLIP = 1.0  # gradient norm to clip to
_WARMUP = 20  # optimizer steps of linear warm-up
_WIDTH = 576  # hidden size up to which the learning rate is taken as it is
_NORM_EPS = 1e-6  # added to a norm that is divided by, as `torch.nn.utils.clip_grad_norm_` does


def by_width(model: DrafterModel, width: int) -> float:
    """Factor of learning rates that are for hidden sizes up to `width` (Yang et al., arXiv 2203.03466, for Adam)."""
    return min(1.0, width / model.config.policy.hidden_size)


class DrafterTrainer:
    """Trains a drafter under the policy's frozen embedding and LM head; some kinds have a head of their own."""

    def __init__(
        self,
        model: DrafterModel,
        section: DrafterSection,
        temperature: float = 1.0,
        average: Callable[[list[Tensor]], None] | None = None,
        precision: Callable[[], AbstractContextManager[object]] = nullcontext,
        state: TrainingState | None = None,
        rate: LearningRate | None = None,
    ):
        """`average` averages gradients over ranks, in place, before `step` applies them. The model's forward passes run
        inside `precision()`. `state` is that of the model's parameters, by default one without a running mean. A
        decaying `rate` ends after `section.num_steps`. A gradient is clipped to norm 1; of a drafter whose loss is a
        mean over drafted positions and not their sum, to a part of it by their number.
        """
        self._precision, self.kind = precision, KINDS[model.config.kind]
        self.model, self._section, self._average = model, section, average
        self._temperature = temperature or 1.0
        self.state = TrainingState(model, states=WITHOUT_MEAN) if state is None else state
        self.rate = rate or LearningRate(by_width(model, _WIDTH) * section.lr, _WARMUP, "cosine")

    @property
    def trained_steps(self) -> int:
        """Optimizer steps behind the present weights."""
        return self.state.steps

    def step(self, batch: DraftBatch, tables: tuple[Tensor, Tensor]) -> dict[str, float]:
        """One optimizer step on one batch; `tables` as in `backward`. Returns metrics. Mutates weights and optimizer.

        Raises DrafterError, and leaves weights and optimizer alone, if the gradient is not finite.
        """
        metrics = self.backward(batch, tables)
        if self._average is not None:
            self._average([p.grad for p in self.model.parameters() if p.grad is not None])
        return metrics | self.apply()

    def backward(
        self, batch: DraftBatch, tables: tuple[Tensor, Tensor], counts: Sequence[int] | None = None
    ) -> dict[str, float]:
        """Sets the parameters' `grad` to the loss's gradient; returns loss and parts. Weights stay as they are.

        `tables`: the policy's embedding and LM head [V, H], on the model's device.

        With `counts` (`bases_by_step` of a larger batch that this one is a share of), gradients and metrics of all
        shares add up to those of the larger batch.
        """
        device = batch.hidden.device.type
        dtype = DTYPES[self._section.sizes(device).dtype]
        needs_cast = next(self.model.parameters()).dtype != dtype
        forward = self._forward(device, dtype if needs_cast else None)
        section, steps = self._section, self._section.drafted(self.kind.facts)
        given = LossInputs(batch, *tables, steps, section.hidden_weight, self._temperature, counts)
        self.model.trained_steps = self.trained_steps
        loss, parts = self.kind.loss(self.model, given, forward)
        self.state.free_gradients()
        loss.backward()  # type: ignore[no-untyped-call]
        by_name = {f"{name}/{step}": v for name, values in parts.items() for step, v in enumerate(values, 1)}
        numbers = torch.stack([loss.detach(), *by_name.values()]).tolist()
        return {**dict(zip(["loss", *by_name], numbers, strict=True)), "tokens": float(len(batch.tokens))}

    @contextmanager
    def _forward(self, device: str, dtype: torch.dtype | None) -> Iterator[None]:
        """Around the model's forward pass; `dtype` where its weights are of another one."""
        with torch.autocast(device, dtype) if dtype is not None else nullcontext(), self._precision():
            yield

    def apply(self, lr_factor: float = 1.0) -> dict[str, float]:
        """Clips the gradient and takes an optimizer step, at `lr_factor` times the configured rate; frees the gradient.
        Collective in the tensor-parallel group of the state. Mutates weights and state.

        Raises DrafterError, and leaves both alone, if the gradient's norm is not finite.
        """
        norm = self.state.take_gradients()
        size = float(norm)
        if not math.isfinite(size):
            self.state.free_gradients()
            raise DrafterError(f"the drafter's gradient norm is {size} in step {self.trained_steps + 1}")
        limit = _CLIP / self.model.averaged_positions
        rate = lr_factor * self.rate.at(self.trained_steps, self._section.num_steps)
        self.state.step(rate, torch.clamp(limit / (norm + _NORM_EPS), max=1.0))
        return {"grad_norm": size, "lr": rate}
