"""The router's product and what it keeps for backward; recorded experts of a micro-batch's rows."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron_tlt.actor.microbatch import RowLayout, filler, pack_micro_batches, recorded_routed_experts, with_routing
from megatron_tlt.actor.routing import Router
from tests.mpi.workers.actor_common import sequences, with_routed_experts


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


@pytest.mark.parametrize("cp", [1, 2])
def test_recorded_experts_come_with_a_forward_each_on_its_tokens_row(cp):
    """An update has all its micro-batches at once, so none of them holds hundreds of bytes a token on the device."""
    every = with_routed_experts(sequences(6), 3)
    every[1].trajectory.routed_experts = None
    layouts = [RowLayout(torch.device("cpu"), "sbhd", 1, cp, rank) for rank in range(cp)]
    for parts in zip(*(pack_micro_batches(every, 200, layout) for layout in layouts), strict=True):
        routed = [with_routing(part, replays=True) for part in parts]
        assert all(part.routing.routed_experts is None and part.routing.replays for part in routed)
        gathered = torch.cat([recorded_routed_experts(part) for part in routed])
        is_token = torch.cat([part.routing.is_token for part in routed])
        if cp > 1:
            gathered, is_token = (x[routed[0].packing.to_whole] for x in (gathered, is_token))
        expected = np.full(tuple(gathered.shape), -1)
        for start, sequence in zip(routed[0].packing.starts, routed[0].sequences, strict=False):
            if sequence.trajectory.routed_experts is not None:
                expected[start : start + sequence.trajectory.length - 1] = sequence.trajectory.routed_experts
        assert np.array_equal(gathered.numpy(), expected)
        assert int(is_token.sum()) == sum(s.trajectory.length - 1 for s in routed[0].sequences)
    assert recorded_routed_experts(filler(layouts[0])) is None
