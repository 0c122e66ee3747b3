"""FP8 arithmetic for the linears of the drafter's layer, by Transformer Engine. `fc`, the LM head and the loss stay.

A tensor is scaled by its present largest value (Float8CurrentScaling), because a draft of several steps calls each
linear several times before the weights change, and a history of scales would mix the calls. Forward values are E4M3
(largest 448), gradients E5M2 (largest 57344), as in Micikevicius et al., 2209.05433, section 3.

FP8 products need multiples of 16 everywhere: sizes of the weights are checked here, rows are filled up with zeros
(which change neither the largest value nor any sum).

Legend: N rows, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from megatron_tlt.drafters.model import DrafterModel
from megatron_tlt.errors import ConfigError

Precision = Callable[[], AbstractContextManager[object]]

_FIELD = "drafter.online.fp8"
_MULTIPLE = 16  # of all sizes of an FP8 product, in elements


def use_fp8(model: DrafterModel, device: torch.device) -> Precision:
    """Puts the layer's linears on FP8; returns the context in which the model's forward passes must run.

    Names and values of the parameters stay. Raises ConfigError if this machine, the installed libraries, or the
    drafter's sizes do not allow it.
    """
    _check_sizes(model)
    if device.type != "cuda":
        raise ConfigError.of(_FIELD, "te", "needs a GPU, and here is none; here: off")
    try:
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import Float8CurrentScaling
    except (ImportError, RuntimeError, OSError) as error:  # an empty meta package raises RuntimeError
        allowed = f"needs Transformer Engine for PyTorch ({error}); here: off"
        raise ConfigError.of(_FIELD, "te", allowed) from error
    available, reason = te.is_fp8_available(return_reason=True)
    if not available:
        raise ConfigError.of(_FIELD, "te", f"is refused by Transformer Engine: {reason}")
    for parent, name, old in model.linears():
        sizes, bias = (old.in_features, old.out_features), old.bias is not None
        new = te.Linear(*sizes, bias=bias, params_dtype=old.weight.dtype, device=device)
        _replace(parent, name, old, new)
        _fill_rows(new)
    return partial(te.autocast, enabled=True, recipe=Float8CurrentScaling())


def _check_sizes(model: DrafterModel) -> None:
    odd = [
        f"{name} ({m.out_features} x {m.in_features})"
        for _, name, m in model.linears()
        if m.in_features % _MULTIPLE or m.out_features % _MULTIPLE
    ]
    if odd:
        allowed = f"needs sizes that are multiples of {_MULTIPLE}, or off; not so: {', '.join(odd)}"
        raise ConfigError.of(_FIELD, "te", allowed)


def _replace(parent: nn.Module, name: str, old: nn.Linear, new: nn.Module) -> None:
    """Puts `new` in `old`'s place with its weights."""
    with torch.no_grad():
        for own, parameter in old.named_parameters():
            getattr(new, own).copy_(parameter)
    setattr(parent, name, new)


def _fill_rows(module: nn.Module) -> None:
    """Rows [N, I] are filled up to a multiple of 16 before `module`, and its output is cut to N again.

    Hooks, not a module around it: the parameters' names are those of the drafter's files.
    """
    rows: list[int] = []

    def before(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *rest = args
        rows.append(len(x))
        return (pad(x, (0, 0, 0, -len(x) % _MULTIPLE)), *rest)

    def after(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output[: rows.pop()]

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
