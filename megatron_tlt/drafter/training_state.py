"""What training a drafter keeps of each parameter: fp32 master weight, running mean, Adam's moments.

Engines draft with the running mean: at a constant learning rate the weights themselves jump about the place they
are drawn to, and their mean is nearer to it (Polyak and Juditsky, 1992).

    parameters  =========|======|==|=====    in the model's type, whole on every rank; forward and backward use them
    parts       [ 0 ][ 1 |  2 ] |3 |  4      of one parameter each, with a bounded number of elements
    kept on       r0   r1   r0   r1  r1      fp32 state, divided among the ranks of a tensor-parallel group

The ranks of a group train one drafter, so each keeps the state of its own parts only (ZeRO, 1910.02054, section 5).
Whatever crosses ranks or types does so part by part: nothing of the drafter's size is ever allocated for it. Where
a parameter is fp32 it is its own master.

Legend: P parameters of the drafter, n elements of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from megatron_tlt.distributed.tensor_parallel import TensorParallel

RAW, MEAN = "raw", "model"  # a checkpoint's "model" drafts
STATES = (RAW, MEAN, "exp_avg", "exp_avg_sq")
WITHOUT_MEAN = (RAW, "exp_avg", "exp_avg_sq")
_PART_ELEMENTS = 1 << 23
_BETAS, _EPS = (0.9, 0.95), 1e-8  # of Adam


@dataclass(slots=True)
class _Part:
    """Elements `begin` .. `begin` + n - 1 of a parameter."""

    name: str
    parameter: nn.Parameter
    begin: int
    weight: Tensor  # [n], a view of the parameter
    kept: dict[str, Tensor] = field(default_factory=dict)  # float32 [n] by kind; empty: another rank keeps them
    gradient: Tensor | None = None  # [n], of the whole group; on the rank that keeps the part

    def of(self, whole: Tensor) -> Tensor:
        """This part [n] of a tensor of the parameter's shape."""
        return whole.reshape(-1)[self.begin : self.begin + len(self.weight)]


class TrainingState:
    """fp32 state of a drafter's parameters, and Adam on it."""

    def __init__(
        self,
        model: nn.Module,
        start: Mapping[str, Tensor] | None = None,
        tp: TensorParallel | None = None,
        part_elements: int = _PART_ELEMENTS,
        kinds: tuple[str, ...] = STATES,
    ):
        """`start`: the parameters by name as they were before the model was cast; without it its present ones. Only
        `kinds` are kept: `WITHOUT_MEAN` can step, and no more.
        """
        self.steps = 0  # that Adam corrects its moments for
        self._tp = tp or TensorParallel()
        self._parameters = dict(model.named_parameters())
        sources = self._parameters if start is None else start
        self._parts = [
            _Part(name, parameter, part_elements * i, weight)
            for name, parameter in self._parameters.items()
            for i, weight in enumerate(parameter.detach().view(-1).split(part_elements))
        ]
        keepers = _dealt([len(part.weight) for part in self._parts], self._tp.size)
        self._own = [part for part, keeper in zip(self._parts, keepers, strict=True) if keeper == self._tp.rank]
        for part in self._own:
            source = part.of(sources[part.name].detach())
            part.kept = {kind: _fresh(kind, part.weight, source) for kind in kinds}
        self._host: list[tuple[Tensor, Tensor]] = []  # what `restore` overwrites, and its copies

    # -- a step ---------------------------------------------------------------------------------------------

    def take_gradients(self) -> Tensor:
        """Takes the parameters' gradients, summed over the group. Collective in the group. Returns their norm (0-d)."""
        for part in self._parts:
            gradient = part.parameter.grad
            taken = torch.zeros_like(part.weight) if gradient is None else part.of(gradient)
            if self._tp.size > 1:
                taken = taken.to(torch.float32, copy=True)
                self._tp.all_reduce(taken)
            part.gradient = taken if part.kept else None
        if self._tp.size > 1:
            self._free_parameter_gradients()
        squares = torch.zeros((), device=self._parts[0].weight.device)
        for part in self._own:
            assert part.gradient is not None
            squares += torch.linalg.vector_norm(part.gradient, dtype=torch.float32).square()
        self._tp.all_reduce(squares)
        return squares.sqrt()

    def step(self, lr: float, factor: Tensor | None) -> None:
        """One Adam step on the gradients taken, times `factor` (0-d), and frees them.

        Collective in the group. Mutates weights, moments and `steps`.
        """
        for part in self._own:
            self._adam(part, lr, factor)
        self.steps += 1
        self.free_gradients()
        for part in self._parts:
            part.weight.copy_(self._gathered(part, RAW))

    def _adam(self, part: _Part, lr: float, factor: Tensor | None) -> None:
        assert part.gradient is not None
        gradient = part.gradient.float()
        adamw(
            [part.kept[RAW]],
            [gradient if factor is None else gradient * factor],
            [part.kept["exp_avg"]],
            [part.kept["exp_avg_sq"]],
            [],
            [torch.full((), float(self.steps), device=gradient.device)],
            fused=True,  # the step of a small drafter is mostly overhead
            amsgrad=False,
            beta1=_BETAS[0],
            beta2=_BETAS[1],
            lr=lr,
            weight_decay=0.0,
            eps=_EPS,
            maximize=False,
        )

    def free_gradients(self) -> None:
        """Frees what a micro-step leaves."""
        for part in self._own:
            part.gradient = None
        self._free_parameter_gradients()

    def _free_parameter_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def _gathered(self, part: _Part, kind: str) -> Tensor:
        """A part's `kind` [n], on every rank of the group; the state itself where one rank keeps all. Collective."""
        if self._tp.size == 1:
            return part.kept[kind]
        flat = part.kept[kind].clone() if part.kept else torch.zeros_like(part.weight, dtype=torch.float32)
        self._tp.all_reduce(flat)
        return flat

    def update_mean(self, decay: float) -> None:
        """mean <- decay * mean + (1 - decay) * weights; 0: it becomes them."""
        for part in self._own:
            part.kept[MEAN].lerp_(part.kept[RAW], 1 - decay)

    # -- between windows ------------------------------------------------------------------------------------

    def is_finite(self) -> bool:
        """Whether all that this rank keeps is finite."""
        return all(bool(torch.isfinite(kept).all()) for part in self._own for kept in part.kept.values())

    def merge(self, weight: float, all_reduce: Callable[[Tensor], None]) -> None:
        """Everything becomes the sum of all ranks' `weight` times it: a mean, as the groups' weights add up to 1. What
        has weight 0 does not enter, whatever it is.

        In place, one part at a time. Collective over the ranks that `all_reduce` sums over.
        """
        for kind in STATES:
            for part in self._parts:
                flat = torch.zeros_like(part.weight, dtype=torch.float32)
                if weight and part.kept:
                    flat.add_(part.kept[kind], alpha=weight)
                all_reduce(flat)
                if part.kept:
                    part.kept[kind].copy_(flat)
                if kind == RAW:
                    part.weight.copy_(flat)

    def remember(self) -> None:
        """Copies weights, mean and moments to the host (pinned if they are on a GPU), for `restore`."""
        if not self._host:
            kept = [tensor for part in self._own for tensor in part.kept.values()]
            kept += [part.weight for part in self._parts if part.weight is not part.kept.get(RAW)]
            self._host = [(t, torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda)) for t in kept]
        for tensor, copy in self._host:
            copy.copy_(tensor, non_blocking=True)
        _wait_for_copies(self._host)

    def restore(self) -> None:
        """Everything is what it was at the last `remember`. No rank waits for another."""
        for tensor, copy in self._host:
            tensor.copy_(copy, non_blocking=True)
        _wait_for_copies(self._host)

    # -- by name --------------------------------------------------------------------------------------------

    def mean(self) -> dict[str, Tensor]:
        """A copy of the running mean by name, in the parameters' type. Collective in the group."""
        return self._copied(MEAN, {name: torch.empty_like(p) for name, p in self._parameters.items()})

    def named(self) -> dict[str, Any]:
        """{kind: {name: float32 tensor}} and "steps": copies in the host's memory, on the group's first rank only.

        Collective in the group.
        """
        shapes = {name: p.shape for name, p in self._parameters.items()} if self._tp.rank == 0 else {}
        named = {
            kind: self._copied(kind, {name: torch.empty(shape) for name, shape in shapes.items()}) for kind in STATES
        }
        return {**named, "steps": self.steps}

    def _copied(self, kind: str, into: dict[str, Tensor]) -> dict[str, Tensor]:
        """`into`, if it has tensors, filled with a kind. Collective in the group."""
        for part in self._parts:
            values = self._gathered(part, kind)
            if into:
                part.of(into[part.name]).copy_(values)
        return into

    def load(self, named: Mapping[str, Any]) -> None:
        """Takes what `named` returned."""
        for part in self._parts:
            for kind, kept in part.kept.items():
                kept.copy_(part.of(named[kind][part.name]))
            part.weight.copy_(part.of(named[RAW][part.name]))
        self.steps = int(named["steps"])


def _dealt(sizes: list[int], ranks: int) -> list[int]:
    """The rank that keeps each part: the largest first, each by the rank that has least so far."""
    keepers, loads = [0] * len(sizes), [0] * ranks
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        keepers[i] = loads.index(min(loads))
        loads[keepers[i]] += sizes[i]
    return keepers


def _fresh(kind: str, weight: Tensor, source: Tensor) -> Tensor:
    """A kind's starting values, float32 [n], where `weight` [n] is, which may be its own master."""
    if kind == RAW and weight.dtype == torch.float32:
        return weight
    if kind in (RAW, MEAN):
        return source.to(weight.device, torch.float32, copy=True)
    return torch.zeros_like(weight, dtype=torch.float32)


def _wait_for_copies(pairs: list[tuple[Tensor, Tensor]]) -> None:
    if pairs and pairs[0][0].is_cuda:
        torch.cuda.current_stream().synchronize()
