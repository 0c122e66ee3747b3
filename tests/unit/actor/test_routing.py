"""The router's product: fp32 logits, and what it keeps for backward."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron_tlt.actor.routing import Router


def test_logits_are_fp32_and_no_copy_of_the_rows_in_fp32_is_kept():
    """A copy would take 4 H bytes a token and layer, which the memory plan does not count."""
    torch.manual_seed(0)
    rows, weight = (torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((12, 1, 16), (4, 16)))
    kept: list[torch.Tensor] = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        logits = Router.gating(SimpleNamespace(weight=weight), rows)
    assert logits.dtype == torch.float32 and {tensor.dtype for tensor in kept} == {torch.bfloat16}
    wanted = rows.double() @ weight.double().T
    torch.testing.assert_close(logits.double(), wanted, rtol=0, atol=1e-5)
    toward = torch.randn(12, 1, 4)
    given = torch.autograd.grad(logits, (rows, weight), toward)
    expected = torch.autograd.grad(wanted, (rows, weight), toward.double())
    for mine, theirs in zip(given, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)
