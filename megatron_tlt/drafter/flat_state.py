"""A drafter's weights, their running mean and AdamW's moments as one flat buffer: to average replicas, to go back, to
save.

The running mean is what is drafted with: at a constant learning rate the weights themselves jump about the place they
are drawn to, and their mean is nearer to it (Polyak and Juditsky, 1992).

Legend: P parameters of the drafter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_MOMENTS = ("exp_avg", "exp_avg_sq")


class FlatState:
    """Weights, running mean and both moments of a model, in the order of its parameters: [4 P], float32."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.AdamW):
        """Gives every parameter moments (zero) that AdamW otherwise makes in its first step; the mean: its weights."""
        self._names = [name for name, _ in model.named_parameters()]
        self.parameters = list(model.parameters())
        self.means = [p.detach().clone() for p in self.parameters]
        self._optimizer = optimizer
        for parameter in self.parameters:
            state = optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), device=parameter.device)  # where fused AdamW wants it
                for name in _MOMENTS:
                    state[name] = torch.zeros_like(parameter)

    @property
    def size(self) -> int:
        """4 P."""
        return sum(t.numel() for t in self._tensors())

    @property
    def steps(self) -> int:
        """Optimizer steps that AdamW corrects its moments for."""
        return int(max(float(self._optimizer.state[p]["step"]) for p in self.parameters))

    @steps.setter
    def steps(self, steps: int) -> None:
        for parameter in self.parameters:
            self._optimizer.state[parameter]["step"].fill_(float(steps))

    @torch.no_grad()
    def follow(self, decay: float) -> None:
        """The mean moves towards the weights: mean <- decay * mean + (1 - decay) * weights; 0: it becomes them."""
        if decay:
            torch._foreach_lerp_(self.means, [p.detach() for p in self.parameters], 1 - decay)
        else:
            torch._foreach_copy_(self.means, [p.detach() for p in self.parameters])

    def mean(self) -> dict[str, Tensor]:
        """The running mean by name, not copied."""
        return dict(zip(self._names, self.means, strict=True))

    def read(self) -> Tensor:
        """A copy [4 P]."""
        return torch.cat([t.detach().flatten().float() for t in self._tensors()])

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        """Overwrites weights, mean and moments with `flat` [4 P]."""
        tensors = self._tensors()
        for tensor, values in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(values.view_as(tensor))

    def named(self) -> dict[str, Any]:
        """The same tensors, not copied: {"model": {name: mean}, "raw": {name: weights}, "exp_avg": ..,
        "exp_avg_sq": .., "steps": n}. A checkpoint's "model" is what is drafted with.
        """
        state = self._optimizer.state
        moments = {
            kind: {n: state[p][kind] for n, p in zip(self._names, self.parameters, strict=True)}
            for kind in _MOMENTS
        }
        weights = {n: p.detach() for n, p in zip(self._names, self.parameters, strict=True)}
        return {"model": self.mean(), "raw": weights, **moments, "steps": self.steps}

    @torch.no_grad()
    def load(self, named: Mapping[str, Any]) -> None:
        """Takes what `named` gives. Raises KeyError for a missing tensor, RuntimeError for a misshapen one."""
        for name, parameter, mean in zip(self._names, self.parameters, self.means, strict=True):
            mean.copy_(named["model"][name])
            parameter.copy_(named["raw"][name])
            for kind in _MOMENTS:
                self._optimizer.state[parameter][kind].copy_(named[kind][name])
        self.steps = int(named["steps"])

    def _tensors(self) -> list[Tensor]:
        moments = [self._optimizer.state[p][kind] for kind in _MOMENTS for p in self.parameters]
        return [*self.parameters, *self.means, *moments]
