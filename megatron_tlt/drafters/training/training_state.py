"""The training state of each parameter of a drafter: fp32 master weight, running mean, Adam's moments.

Engines draft with the running mean: at a constant learning rate the weights scatter around the optimum, and
their mean is nearer to it (Polyak and Juditsky, 1992).

    parameter   [=============]      in the model's type, whole on every rank; forward and backward use it
    kept on     [ r0 | r1 | r2 ]     fp32 state, an equal share on each rank of a tensor-parallel group

The ranks of a group train one drafter, so each keeps the state of its own share only (ZeRO, 1910.02054, section 5).
Collectives are over one parameter at a time. An fp32 parameter of a group of one rank is its own master.

Legend: n elements of this rank's share of a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim.adamw import adamw

from megatron_tlt.distributed.tensor_parallel import TensorParallel

RAW, MEAN = "raw", "model"  # a checkpoint's "model" drafts
STATE_NAMES = (RAW, MEAN, "exp_avg", "exp_avg_sq")
WITHOUT_MEAN = (RAW, "exp_avg", "exp_avg_sq")
_BETAS, _EPS = (0.9, 0.95), 1e-8  # of Adam


class TrainingState:
    """fp32 state of a drafter's parameters, and Adam on it."""

    def __init__(
        self,
        model: nn.Module,
        start: Mapping[str, Tensor] | None = None,
        tp: TensorParallel | None = None,
        states: tuple[str, ...] = STATE_NAMES,
    ):
        """`start`: the parameters by name as they were before the model was cast; without it its present ones. Only
        `states` are kept: `WITHOUT_MEAN` can step, and no more.
        """
        self.steps = 0  # optimizer steps behind the weights, which Adam corrects its moments for
        self._tp = tp or TensorParallel()
        self._parameters = dict(model.named_parameters())
        sources = self._parameters if start is None else start
        self._kept: dict[str, dict[str, Tensor]] = {state: {} for state in states}  # float32 [n] by state and name
        for name, parameter in self._parameters.items():
            weight, source = self._own(parameter.detach()), self._own(sources[name].detach())
            for state in states:
                self._kept[state][name] = _fresh(state, weight, source)
        self._gradients: list[Tensor] = []  # float32 [n] by parameter, of the whole group
        self._host: list[tuple[Tensor, Tensor]] = []  # the tensors that `restore` overwrites, and their copies
        self._host_steps = 0

    def _own(self, whole: Tensor) -> Tensor:
        """This rank's share [n] of a tensor of a parameter's shape, a view."""
        return whole.reshape(-1).tensor_split(self._tp.size)[self._tp.rank]

    # -- a step ---------------------------------------------------------------------------------------------

    def take_gradients(self) -> Tensor:
        """Takes the parameters' gradients, summed over the group. Collective in the group. Returns their norm (0-d)."""
        self._gradients.clear()
        for parameter in self._parameters.values():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = None
            gradient = gradient.float()
            self._tp.all_reduce(gradient)
            self._gradients.append(self._own(gradient) if self._tp.size == 1 else self._own(gradient).clone())
        squares = get_total_norm(self._gradients).square()
        self._tp.all_reduce(squares)
        return squares.sqrt()

    def step(self, lr: float, factor: Tensor | None) -> None:
        """One Adam step on the gradients taken, times `factor` (0-d), and frees them.

        Collective in the group. Mutates weights, moments and `steps`.
        """
        if factor is not None:
            torch._foreach_mul_(self._gradients, factor)
        weights, first, second = (list(self._kept[state].values()) for state in (RAW, "exp_avg", "exp_avg_sq"))
        adamw(
            weights,
            self._gradients,
            first,
            second,
            [],
            [torch.full((), float(self.steps), device=weight.device) for weight in weights],
            fused=True,  # the step of a small drafter is mostly overhead
            amsgrad=False,
            beta1=_BETAS[0],
            beta2=_BETAS[1],
            lr=lr,
            weight_decay=0.0,
            eps=_EPS,
            maximize=False,
        )
        self.steps += 1
        self.free_gradients()
        for name, values in self._gathered(RAW):
            self._parameters[name].detach().copy_(values)

    def free_gradients(self) -> None:
        """Frees what a micro-step leaves."""
        self._gradients.clear()
        for parameter in self._parameters.values():
            parameter.grad = None

    def _gathered(self, state: str) -> Iterator[tuple[str, Tensor]]:
        """Name and whole value of each parameter's state, float32; the state itself where one rank keeps all.

        Collective in the group.
        """
        for name, kept in self._kept[state].items():
            parameter = self._parameters[name]
            if self._tp.size == 1:
                yield name, kept.view_as(parameter)
                continue
            whole = self._weighted(kept, parameter, 1.0)
            self._tp.all_reduce(whole)
            yield name, whole

    def update_mean(self, decay: float) -> None:
        """mean <- decay * mean + (1 - decay) * weights; 0: it becomes them."""
        mean, raw = (list(self._kept[state].values()) for state in (MEAN, RAW))
        torch._foreach_lerp_(mean, raw, 1 - decay)

    # -- between windows ------------------------------------------------------------------------------------

    def is_finite(self) -> bool:
        """Whether all that this rank keeps is finite."""
        return all(bool(torch.isfinite(t).all()) for kept in self._kept.values() for t in kept.values())

    def merge(self, weight: float, all_reduce: Callable[[Tensor], None]) -> None:
        """Everything becomes the sum of all ranks' `weight` times it: a mean, as the groups' weights add up to 1. What
        has weight 0 does not enter, whatever it is.

        In place, one parameter at a time. Collective over the ranks that `all_reduce` sums over.
        """
        for state, kept in self._kept.items():
            for name, parameter in self._parameters.items():
                whole = self._weighted(kept[name], parameter, weight)
                all_reduce(whole)
                kept[name].copy_(self._own(whole))
                if state == RAW:
                    parameter.detach().copy_(whole)
                del whole  # before the next one is there

    def _weighted(self, kept: Tensor, parameter: Tensor, weight: float) -> Tensor:
        """Float32 like `parameter`: `weight` times this rank's share [n], 0 elsewhere."""
        whole = torch.zeros_like(parameter, dtype=torch.float32)
        if weight:
            self._own(whole).add_(kept, alpha=weight)
        return whole

    def remember(self) -> None:
        """Copies weights, mean and moments to the host (pinned if they are on a GPU), for `restore`."""
        self._host_steps = self.steps
        if not self._host:
            changing = [tensor for kept in self._kept.values() for tensor in kept.values()]
            is_whole = self._tp.size == 1  # then fp32 parameters are their own masters
            parameters = [p.detach() for p in self._parameters.values()]
            changing += [p for p in parameters if not (is_whole and p.dtype == torch.float32)]
            self._host = [(t, torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda)) for t in changing]
        for tensor, copy in self._host:
            copy.copy_(tensor, non_blocking=True)
        _wait_for_copies(self._host)

    def restore(self) -> None:
        """Sets everything back to the last `remember`. No rank waits for another."""
        self.steps = self._host_steps
        for tensor, copy in self._host:
            tensor.copy_(copy, non_blocking=True)
        _wait_for_copies(self._host)

    def reset(self, name: str) -> None:
        """Master and mean of a parameter become its present value; its moments stay."""
        for state in (RAW, MEAN):
            self._kept[state][name].copy_(self._own(self._parameters[name].detach()))

    # -- by name --------------------------------------------------------------------------------------------

    def mean(self) -> dict[str, Tensor]:
        """A copy of the running mean by name, in the parameters' type. Collective in the group."""
        return {name: t.to(self._parameters[name].dtype, copy=True) for name, t in self._gathered(MEAN)}

    def named(self) -> dict[str, Any]:
        """{state: {name: float32 tensor}} and "steps": copies in the host's memory, on the group's first rank only.

        Collective in the group.
        """
        named: dict[str, Any] = {state: {} for state in self._kept}
        for state, into in named.items():
            for name, whole in self._gathered(state):
                if self._tp.rank == 0:
                    into[name] = whole.to("cpu", copy=True)
        return {**named, "steps": self.steps}

    def load(self, named: Mapping[str, Any]) -> None:
        """Takes what `named` returned."""
        for state, kept in self._kept.items():
            for name, tensor in kept.items():
                tensor.copy_(self._own(named[state][name]))
        for name, parameter in self._parameters.items():
            parameter.detach().copy_(named[RAW][name])
        self.steps = int(named["steps"])


def _fresh(state: str, weight: Tensor, source: Tensor) -> Tensor:
    """A state's starting values, float32 [n], where `weight` [n] is, which may be its own master."""
    if state == RAW and weight.dtype == torch.float32:
        return weight
    if state in (RAW, MEAN):
        return source.to(weight.device, torch.float32, copy=True)
    return torch.zeros_like(weight, dtype=torch.float32)


def _wait_for_copies(pairs: list[tuple[Tensor, Tensor]]) -> None:
    if pairs and pairs[0][0].is_cuda:
        torch.cuda.current_stream().synchronize()
