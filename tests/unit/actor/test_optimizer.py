"""The optimizer step on a GPU without Transformer Engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_tlt.actor import optimizer
from megatron_tlt.config.actor import OptimizerSection


class ListOperators(TorchDispatchMode):
    """Names of the operators that work on lists of tensors: their temporaries are as large as all parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_foreach_" in func.name():
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_torchs_adamw_updates_one_parameter_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.ones(4)
    inner = torch.optim.AdamW(parameters, foreach=True, betas=(0.9, 0.999))  # as a checkpoint brings them
    inner.param_groups[0] |= {"lr_mult": 1.0, "wd_mult": 0.0}

    def step() -> bool:
        inner.step()
        return True

    megatrons = SimpleNamespace(
        prepare_grads=lambda: False,
        get_grad_norm=lambda: 1.0,
        param_groups=inner.param_groups,
        step_with_ready_grads=step,
    )
    monkeypatch.setattr(optimizer, "HAS_CUDA", True)
    with ListOperators() as found:
        section = OptimizerSection(name="adam", lr=0.5, clip_grad=0.0, beta1=0.8, beta2=0.95)
        result = optimizer.guarded_step(megatrons, section, 0.5)
    assert result.applied and not found.names
    assert inner.param_groups[0]["betas"] == (0.8, 0.95), "the configuration's"
    torch.testing.assert_close(parameters[0].detach(), torch.full((4,), 0.5))
