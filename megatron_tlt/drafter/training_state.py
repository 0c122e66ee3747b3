"""What training a drafter keeps of each parameter: fp32 master weight, running mean, Adam's moments.

Engines draft with the running mean: at a constant learning rate the weights themselves jump about the place they
are drawn to, and their mean is nearer to it (Polyak and Juditsky, 1992).

    parameters  ====|=======|==|=====    in the model's type, whole on every rank; forward and backward use them
    buckets     [ 0 ][ 1 ][ 2 ][ 3 ][4   bounded numbers of elements, in the parameters' order
    kept on      r0   r1   r0   r1   r0  fp32 state, divided among the ranks of a tensor-parallel group

The ranks of a group train one drafter, so each keeps the state of its own buckets only (ZeRO, 1910.02054, section 5).
Whatever crosses ranks or types does so bucket by bucket: nothing of the drafter's size is ever allocated for it. Where
a parameter is fp32 it is its own master.

Legend: P parameters of the drafter, n elements of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from megatron_tlt.distributed.tensor_parallel import TensorParallel

RAW, MEAN = "raw", "model"  # a checkpoint's "model" drafts
KINDS = (RAW, MEAN, "exp_avg", "exp_avg_sq")
_BUCKET_ELEMENTS = 1 << 23
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

    @property
    def is_master(self) -> bool:
        """Whether the parameter itself is the fp32 weight."""
        return self.weight.dtype == torch.float32

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
        kinds: tuple[str, ...] = KINDS,
        bucket_elements: int = _BUCKET_ELEMENTS,
    ):
        """`start`: the parameters by name as they were before the model was cast; without it its present ones. Only
        `kinds` are kept (without the mean there is none to draft with).
        """
        self.steps = 0  # that Adam corrects its moments for
        self._tp, self._kinds = tp or TensorParallel(), kinds
        self._parameters = dict(model.named_parameters())
        self._whole: dict[str, dict[str, Tensor]] = {kind: {} for kind in kinds}  # where one rank keeps everything
        self._buckets = self._cut(bucket_elements)
        self._own = [bucket for i, bucket in enumerate(self._buckets) if self._keeps(i)]
        self._host: list[tuple[Tensor, Tensor]] = []  # what `restore` overwrites, and its copies
        sources = self._parameters if start is None else start
        if self._tp.size == 1:
            for name, parameter in self._parameters.items():
                for kind in kinds:
                    self._whole[kind][name] = _fresh(kind, parameter.detach(), sources[name])
        for part in self._parts:
            source = part.of(sources[part.name].detach())
            for kind in kinds:
                whole = self._whole[kind].get(part.name)
                part.kept[kind] = _fresh(kind, part.weight, source) if whole is None else part.of(whole)

    def _cut(self, size: int) -> list[list[_Part]]:
        buckets: list[list[_Part]] = [[]]
        room = size
        for name, parameter in self._parameters.items():
            flat, begin = parameter.detach().view(-1), 0
            while begin < len(flat):
                if not room:
                    buckets.append([])
                    room = size
                weight = flat[begin : begin + room]
                buckets[-1].append(_Part(name, parameter, begin, weight))
                begin, room = begin + len(weight), room - len(weight)
        return buckets

    def _keeps(self, bucket: int) -> bool:
        return bucket % self._tp.size == self._tp.rank

    @property
    def _parts(self) -> Iterator[_Part]:
        """Those whose state this rank keeps."""
        return (part for bucket in self._own for part in bucket)

    # -- a step ---------------------------------------------------------------------------------------------

    def take_gradients(self) -> Tensor:
        """Takes the parameters' gradients, summed over the group. Collective in the group. Returns their norm (0-d)."""
        for i, bucket in enumerate(self._buckets):
            if self._tp.size == 1:
                for part in bucket:
                    part.gradient = None if part.parameter.grad is None else part.of(part.parameter.grad)
                continue
            flat = torch.cat([_gradient_of(part) for part in bucket])
            self._tp.all_reduce(flat)
            if self._keeps(i):
                for part, gradient in zip(bucket, _split(flat, bucket), strict=True):
                    part.gradient = gradient
        if self._tp.size > 1:
            self._free_parameter_gradients()
        gradients = [part.gradient for part in self._parts if part.gradient is not None]
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
        device = next(iter(self._parameters.values())).device
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device=device)
        if self._tp.size == 1:
            return norm
        squares = norm.square()
        self._tp.all_reduce(squares)
        return squares.sqrt()

    def step(self, lr: float, factor: Tensor | None) -> None:
        """One Adam step on the gradients taken, times `factor` (0-d), and frees them.

        Collective in the group. Mutates weights, moments and `steps`.
        """
        for bucket in self._own:
            if parts := [part for part in bucket if part.gradient is not None]:
                self._adam(parts, lr, factor)
        self.steps += 1
        self.free_gradients()
        self._publish_weights()

    def _adam(self, parts: list[_Part], lr: float, factor: Tensor | None) -> None:
        gradients = [p.gradient.float() for p in parts if p.gradient is not None]
        if factor is not None:
            torch._foreach_mul_(gradients, factor)
        weights, first, second = ([p.kept[kind] for p in parts] for kind in (RAW, "exp_avg", "exp_avg_sq"))
        steps = [torch.full((), float(self.steps), device=w.device) for w in weights]
        adamw(
            weights,
            gradients,
            first,
            second,
            [],
            steps,
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
        for part in self._parts:
            part.gradient = None
        self._free_parameter_gradients()

    def _free_parameter_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def _publish_weights(self) -> None:
        """The parameters become their masters, on every rank of the group."""
        if self._tp.size == 1:
            for part in self._parts:
                if not part.is_master:
                    part.weight.copy_(part.kept[RAW])
            return
        for i, bucket in enumerate(self._buckets):
            self._spread(i, RAW, [part.weight for part in bucket])

    def _spread(self, index: int, kind: str, targets: list[Tensor]) -> None:
        """`targets` [n], if there are any, become one bucket's `kind`. Collective in the group."""
        bucket = self._buckets[index]
        flat = self._contribution(index, kind, 1.0)
        self._tp.all_reduce(flat)
        for target, values in zip(targets, _split(flat, bucket), strict=bool(targets)):
            target.copy_(values)

    def _contribution(self, index: int, kind: str, weight: float) -> Tensor:
        """`weight` times one bucket's `kind`, flat: zeros for weight 0, whatever the state is, and on other ranks."""
        bucket = self._buckets[index]
        if weight and self._keeps(index):
            return torch.cat([part.kept[kind] for part in bucket]).mul_(weight)
        return torch.zeros(sum(len(part.weight) for part in bucket), device=bucket[0].weight.device)

    def update_mean(self, decay: float) -> None:
        """mean <- decay * mean + (1 - decay) * weights; 0: it becomes them."""
        means, weights = ([part.kept[kind] for part in self._parts] for kind in (MEAN, RAW))
        if not means:  # a small drafter in a large group
            return
        if decay:
            torch._foreach_lerp_(means, weights, 1 - decay)
        else:
            torch._foreach_copy_(means, weights)

    # -- between windows ------------------------------------------------------------------------------------

    def is_finite(self) -> bool:
        """Whether all that this rank keeps is finite."""
        checks = [torch.isfinite(kept).all() for part in self._parts for kept in part.kept.values()]
        return bool(torch.stack(checks).all()) if checks else True

    def merge(self, weight: float, all_reduce: Callable[[Tensor], None]) -> None:
        """Everything becomes the sum of all ranks' `weight` times it: a mean, as the groups' weights add up to 1.

        In place, one bucket at a time. Collective over the ranks that `all_reduce` sums over.
        """
        for kind in self._kinds:
            for i, bucket in enumerate(self._buckets):
                flat = self._contribution(i, kind, weight)
                all_reduce(flat)
                for part, values in zip(bucket, _split(flat, bucket), strict=True):
                    if part.kept:
                        part.kept[kind].copy_(values)
                    if kind == RAW:
                        part.weight.copy_(values)

    def remember(self) -> None:
        """Copies weights, mean and moments to the host (pinned if they are on a GPU), for `restore`."""
        if not self._host:
            kept = [tensor for part in self._parts for tensor in part.kept.values()]
            kept += [p.weight for bucket in self._buckets for p in bucket if not (p.kept and p.is_master)]
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
        """The running mean by name: not copied where one rank keeps it whole; else gathered, in the parameters' type.

        Collective in the group.
        """
        if self._tp.size == 1:
            return self._whole[MEAN]
        out = {name: torch.empty_like(p) for name, p in self._parameters.items()}
        self._gather(MEAN, out)
        return out

    def named(self) -> dict[str, Any]:
        """{kind: {name: float32 tensor}} and "steps": not copied where one rank keeps everything; else gathered, to the
        host of the group's first rank, and empty on the others. Collective in the group.
        """
        if self._tp.size == 1:
            return {**self._whole, "steps": self.steps}
        shapes = {name: p.shape for name, p in self._parameters.items()} if self._tp.rank == 0 else {}
        named = {
            kind: {name: torch.empty(shape) for name, shape in shapes.items()} for kind in self._kinds
        }
        for kind, tensors in named.items():
            self._gather(kind, tensors)
        return {**named, "steps": self.steps}

    def _gather(self, kind: str, into: Mapping[str, Tensor]) -> None:
        for i, bucket in enumerate(self._buckets):
            self._spread(i, kind, [part.of(into[part.name]) for part in bucket] if into else [])

    def load(self, named: Mapping[str, Any]) -> None:
        """Takes what `named` returned. Raises KeyError for a missing tensor, RuntimeError for a misshapen one, before
        anything is changed.
        """
        for kind in self._kinds:
            for name, parameter in self._parameters.items():
                shape = named[kind][name].shape
                if shape != parameter.shape:
                    raise RuntimeError(f"{kind} of {name} is {tuple(shape)}, not {tuple(parameter.shape)}")
        for bucket in self._buckets:
            for part in bucket:
                for kind, kept in part.kept.items():
                    kept.copy_(part.of(named[kind][part.name]))
                part.weight.copy_(part.of(named[RAW][part.name]))
        self.steps = int(named["steps"])


def _fresh(kind: str, weight: Tensor, source: Tensor) -> Tensor:
    """A kind's starting values, float32, in the shape and place of `weight`, which may be its own master."""
    if kind == RAW and weight.dtype == torch.float32:
        return weight
    if kind in (RAW, MEAN):
        return source.detach().to(weight.device, torch.float32, copy=True)
    return torch.zeros_like(weight, dtype=torch.float32)


def _gradient_of(part: _Part) -> Tensor:
    """The parameter's gradient float32 [n], a copy; zeros where it has none."""
    if part.parameter.grad is None:
        return torch.zeros_like(part.weight, dtype=torch.float32)
    return part.of(part.parameter.grad).to(torch.float32, copy=True)


def _split(flat: Tensor, bucket: list[_Part]) -> tuple[Tensor, ...]:
    return flat.split([len(part.weight) for part in bucket])


def _wait_for_copies(pairs: list[tuple[Tensor, Tensor]]) -> None:
    if pairs and pairs[0][0].is_cuda:
        torch.cuda.current_stream().synchronize()
