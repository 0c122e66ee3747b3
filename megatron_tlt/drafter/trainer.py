"""`DrafterTrainer`: one bounded micro-step at a time, so that a rank may train whenever it has nothing else to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.drafter.loss import LossWeights, draft_loss
from megatron_tlt.models.eagle import EagleModel
from megatron_tlt.models.eagle3 import Eagle3Model
from megatron_tlt.models.eagle_pairs import PairBatch, PairLayout

Average = Callable[[list[Tensor]], None]


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
    ):
        """embed and head [V, H] on the model's device; they are the policy's, see `set_policy`."""
        self.model, self._section, self._average = model, section, average
        self.set_policy(embed, head)
        loss = section.loss
        self.weights = LossWeights(
            loss.kind, loss.hidden_weight, loss.ce_weight, loss.tv_weight, loss.step_decay, temperature or 1.0
        )
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim == 1]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": section.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=section.lr,
            betas=(0.9, 0.95),
        )
        self.trained_steps = 0

    def set_policy(self, embed: Tensor, head: Tensor) -> None:
        """Takes the policy's present embedding and LM head; hidden states must come from the same version."""
        self.embed, self.head = embed, head

    def step(self, batch: PairBatch) -> dict[str, float]:
        """One optimizer step on one batch. Returns metrics. Mutates weights and optimizer."""
        section, model = self._section, self.model
        layout = PairLayout(batch)
        with torch.autocast(batch.hidden.device.type, torch.bfloat16, enabled=section.dtype == "bf16"):
            outputs = model.unroll(self.embed, batch, layout, section.draft_steps)
        loss, parts = self._loss(outputs, batch, layout)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if self._average is not None:
            self._average(gradients)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), section.clip_grad or math.inf)
        rate = learning_rate(section, self.trained_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self.trained_steps += 1
        metrics = {"loss": float(loss.detach()), "grad_norm": float(norm), "lr": rate}
        metrics["tokens"] = float(len(batch.tokens))
        for name, values in parts.items():
            metrics |= {f"{name}/{step}": value for step, value in enumerate(values, 1)}
        return metrics

    def _loss(
        self, outputs: Sequence[Tensor], batch: PairBatch, layout: PairLayout
    ) -> tuple[Tensor, dict[str, list[float]]]:
        """The loss (0-d) and its parts by unrolled step."""
        loss, report = draft_loss(outputs, batch, layout, self.head, self.weights)
        return loss, {"hidden": report.hidden, "ce": report.ce, "accept": report.accept}

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer and step count."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "trained_steps": self.trained_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes `state_dict`'s. Mutates weights, optimizer and step count."""
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(deepcopy(state["optimizer"]))  # it would share the moments' tensors
        self.trained_steps = int(state["trained_steps"])


def learning_rate(section: DrafterSection, step: int) -> float:
    """The rate of optimizer step `step` (0-based)."""
    if step < section.warmup_steps:
        return section.lr * (step + 1) / section.warmup_steps
    if section.schedule == "constant":
        return section.lr
    done = min(1.0, (step - section.warmup_steps) / max(1, section.num_steps - section.warmup_steps))
    return section.min_lr + (section.lr - section.min_lr) * 0.5 * (1 + math.cos(math.pi * done))
