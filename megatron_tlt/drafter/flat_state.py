"""A drafter's weights, their running mean and AdamW's moments: as one flat buffer to average over replicas and to go
back to, and by name for checkpoints.

Engines draft with the running mean: at a constant learning rate the weights themselves jump about the place they
are drawn to, and their mean is nearer to it (Polyak and Juditsky, 1992).

Legend: P parameters of the drafter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

KINDS = (
    "raw",
    "model",
    "exp_avg",
    "exp_avg_sq",
)  # weights, running mean, moments; a checkpoint's "model" drafts


class FlatState:
    """Four tensors of each parameter, in the order of the model's parameters: [4 P], float32."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.AdamW):
        """Gives every parameter zero moments, which AdamW otherwise makes in its first step; the mean: its weights."""
        self._names = [name for name, _ in model.named_parameters()]
        self._states = [optimizer.state[p] for p in model.parameters()]
        weights = [p.detach() for p in model.parameters()]
        for state, weight in zip(self._states, weights, strict=True):
            state["step"] = torch.zeros((), device=weight.device)  # where fused AdamW expects it
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        moments = [[state[kind] for state in self._states] for kind in ("exp_avg", "exp_avg_sq")]
        self._tensors = dict(zip(KINDS, [weights, [w.clone() for w in weights], *moments], strict=True))

    @property
    def steps(self) -> int:
        """Optimizer steps that AdamW corrects its moments for."""
        return int(max(float(state["step"]) for state in self._states))

    @steps.setter
    def steps(self, steps: int) -> None:
        for state in self._states:
            state["step"].fill_(float(steps))

    def update_mean(self, decay: float) -> None:
        """mean <- decay * mean + (1 - decay) * weights; 0: it becomes them."""
        if decay:
            torch._foreach_lerp_(self._tensors["model"], self._tensors["raw"], 1 - decay)
        else:
            torch._foreach_copy_(self._tensors["model"], self._tensors["raw"])

    def mean(self) -> dict[str, Tensor]:
        """The running mean by name, not copied."""
        return dict(zip(self._names, self._tensors["model"], strict=True))

    def read(self) -> Tensor:
        """A copy [4 P]."""
        return torch.cat([t.flatten().float() for tensors in self._tensors.values() for t in tensors])

    def weighted(self, weight: float) -> Tensor:
        """`read` times `weight`; zeros for weight 0, whatever the state is."""
        flat = self.read()
        return flat.mul_(weight) if weight else flat.zero_()

    def write(self, flat: Tensor) -> None:
        """Overwrites weights, mean and moments with `flat` [4 P]."""
        tensors = [t for tensors in self._tensors.values() for t in tensors]
        for tensor, values in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(values.view_as(tensor))

    def named(self) -> dict[str, Any]:
        """{kind: {name: tensor}} of `KINDS`, not copied, and "steps"."""
        named = {kind: dict(zip(self._names, t, strict=True)) for kind, t in self._tensors.items()}
        return {**named, "steps": self.steps}

    def load(self, named: Mapping[str, Any]) -> None:
        """Takes what `named` returned. Raises KeyError for a missing tensor, RuntimeError for a misshapen one."""
        for kind, tensors in self._tensors.items():
            for name, tensor in zip(self._names, tensors, strict=True):
                tensor.copy_(named[kind][name])
        self.steps = int(named["steps"])
