"""Optimizer state on the host: one copy of it there at a time, and none while it is on the device."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import torch

from megatron_tlt.actor.offload import OptimizerOffload


def test_the_hosts_copies_are_freed_while_the_state_is_on_the_device() -> None:
    master = torch.nn.Parameter(torch.arange(100.0))
    inner = torch.optim.SGD([master])
    nothing = SimpleNamespace(parameters=list)
    ddp = SimpleNamespace(module=nothing, offload_grad_buffers=lambda: None, restore_grad_buffers=lambda: None)
    offload = OptimizerOffload(ddp, SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=inner)]))
    offload.offload()
    assert master.untyped_storage().nbytes() == 0
    copies = [weakref.ref(host) for _, host in offload._host_copies or ()]
    assert copies and all(copy() is not None for copy in copies)
    with offload.on_device():
        assert all(copy() is None for copy in copies), "the next copies would be made beside these"
        assert torch.equal(master, torch.arange(100.0))
    assert master.untyped_storage().nbytes() == 0
    assert torch.equal(offload.values_of(master.detach()), torch.arange(100.0))
