"""`DrafterTrainer`: one bounded micro-step at a time, so that a rank may train whenever it has nothing else to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.drafter.loss import LossWeights, draft_loss
from megatron_tlt.errors import DrafterError
from megatron_tlt.models.eagle.eagle3 import Eagle3Model
from megatron_tlt.models.eagle.model import EagleModel
from megatron_tlt.models.eagle.pairs import PairBatch, PairLayout

Average = Callable[[list[Tensor]], None]
Precision = Callable[[], AbstractContextManager[object]]


class DrafterTrainer:
    """AdamW on an `EagleModel` under a frozen embedding and LM head.

    `step` has no collectives of its own; `average`, if given, is called with the gradients before they are used (a
    warm-up on several ranks averages them there).
    """

    def __init__(
        self,
        model: EagleModel | Eagle3Model,
        embed: Tensor,
        head: Tensor,
        section: DrafterSection,
        temperature: float = 1.0,
        average: Average | None = None,
        precision: Precision = nullcontext,
        hidden_state_noise: float = 0.0,
    ):
        """embed and head [V, H] on the model's device; they are the policy's, see `set_policy`.

        The model's forward passes run inside `precision()`. `hidden_state_noise` is the noise on the hidden states that
        the model reads, as a share of their root mean square.
        """
        self._noise = hidden_state_noise
        self._precision = precision
        self.model, self._section, self._average = model, section, average
        self.set_policy(embed, head)
        loss = section.loss
        self.weights = LossWeights(
            loss.kind, loss.hidden_weight, loss.ce_weight, loss.tv_weight, loss.step_decay, temperature or 1.0
        )
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": section.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=section.lr,
            betas=(0.9, 0.95),
            fused=True,  # the step of a small drafter is mostly overhead
        )
        self.trained_steps = 0

    def set_policy(self, embed: Tensor, head: Tensor) -> None:
        """Takes the policy's present embedding and LM head; hidden states must come from the same version."""
        self.embed, self.head = embed, head

    def step(self, batch: PairBatch) -> dict[str, float]:
        """One optimizer step on one batch. Returns metrics. Mutates weights and optimizer.

        Raises DrafterError, and leaves weights and optimizer alone, if the gradient is not finite.
        """
        metrics = self.backward(batch)
        if self._average is not None:
            self._average([p.grad for p in self.model.parameters() if p.grad is not None])
        return metrics | self.apply()

    def backward(self, batch: PairBatch, counts: Sequence[int] | None = None) -> dict[str, float]:
        """Leaves the loss's gradient in the parameters' `grad`; returns the loss's parts. Weights stay as they are.

        With `counts` (`bases_by_step` of a larger batch that this one is a share of), gradients and metrics of all
        shares add up to those of the larger batch.
        """
        model, layout = self.model, PairLayout(batch)
        steps, bf16 = self._section.draft_steps, self._section.dtype == "bf16"
        with torch.autocast(batch.hidden.device.type, torch.bfloat16, enabled=bf16), self._precision():
            outputs = model.unroll(self.embed, self._blurred(batch), layout, steps)
        loss, parts = self._loss(outputs, batch, layout, counts)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        metrics = {"loss": float(loss.detach()), "tokens": float(len(batch.tokens))}
        for name, values in parts.items():
            metrics |= {f"{name}/{step}": value for step, value in enumerate(values, 1)}
        return metrics

    def _blurred(self, batch: PairBatch) -> PairBatch:
        """The batch as the model reads it: with noise on its hidden states (as EAGLE, 2401.15077, and TLT do).

        Drawn from the seed and the number of the step, so that a resumed run draws the same.
        """
        if not self._noise:
            return batch
        generator = torch.Generator(batch.hidden.device)
        generator.manual_seed((self._section.seed << 32) + self.trained_steps)
        hidden = batch.hidden.float()
        noise = torch.randn(hidden.shape, generator=generator, device=hidden.device)
        scale = self._noise * hidden.pow(2).mean().sqrt()
        return replace(batch, hidden=(hidden + scale * noise).to(batch.hidden.dtype))

    def _loss(
        self, outputs: Sequence[Tensor], batch: PairBatch, layout: PairLayout, counts: Sequence[int] | None
    ) -> tuple[Tensor, dict[str, list[float]]]:
        """The loss (0-d) and its parts by unrolled step; `counts` as in `backward`."""
        loss, report = draft_loss(outputs, batch, layout, self.head, self.weights, counts)
        return loss, {"hidden": report.hidden, "ce": report.ce, "accept": report.accept}

    def apply(self) -> dict[str, float]:
        """Clips the gradient and takes an optimizer step. Mutates weights and optimizer.

        Raises DrafterError, and leaves both alone, if the gradient's norm is not finite.
        """
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._section.clip_grad or math.inf)
        if not math.isfinite(float(norm)):
            raise DrafterError(f"the drafter's gradient norm is {float(norm)} in step {self.trained_steps}")
        rate = learning_rate(self._section, self.trained_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.trained_steps += 1
        return {"grad_norm": float(norm), "lr": rate}

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer and step count."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "trained_steps": self.trained_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes `state_dict`'s. Mutates weights, optimizer and step count."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(deepcopy(state["optimizer"]))  # it would share the moments' tensors
        self.trained_steps = int(state["trained_steps"])


def learning_rate(section: DrafterSection, step: int) -> float:
    """The rate of optimizer step `step` (0-based)."""
    if step < section.warmup_steps:
        return section.lr * (step + 1) / section.warmup_steps
    if section.schedule == "constant":
        return section.lr
    done = min(1.0, (step - section.warmup_steps) / max(1, section.num_steps - section.warmup_steps))
    return section.min_lr + (section.lr - section.min_lr) * 0.5 * (1 + math.cos(math.pi * done))
