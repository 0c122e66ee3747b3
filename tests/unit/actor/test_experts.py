"""Experts of the actor: what only some devices show."""

from __future__ import annotations

import torch

from megatron_tlt.actor.experts import _ZeroUnused


def test_gradients_of_experts_without_a_row_are_zero_whatever_the_product_left_there():
    weight = torch.ones(3, 2, 2, requires_grad=True)
    found = torch.full((3, 2, 2), 7.0)
    found[1] = torch.nan
    _ZeroUnused.apply(weight, torch.tensor([2, 0, 1])).backward(found)
    assert weight.grad.tolist() == torch.where(torch.isnan(found), 0, found).tolist()
