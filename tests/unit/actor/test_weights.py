"""Hugging Face tensors into a stage's shards, without ranks; those with ranks are in tests/mpi."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_tlt.actor.hf_names import shard, slots
from megatron_tlt.actor.weights import load_weights
from tests.helpers.tiny_models import TINY, random_weights


def test_a_load_shows_a_sign_of_life_before_each_tensor() -> None:
    """All replicas read all weights: on a slow file system that takes longer than `watchdog.hang_s`."""
    weights, events = dict(random_weights(TINY)), []

    def read(name: str) -> Tensor:
        events.append("read")
        return weights[name]

    which = slots(TINY, 1)
    shards = {s.paths[0]: shard(TINY, s, [weights[name] for name in s.hf_names], 0, 1) for s in which}
    parameters = {path: nn.Parameter(torch.empty_like(part)) for path, part in shards.items()}
    module: Any = SimpleNamespace(named_parameters=parameters.items)
    at = SimpleNamespace(pp=0, tp=0)
    groups: Any = SimpleNamespace(dims=SimpleNamespace(pp=1, tp=1, ep=1), at=at)
    load_weights(module, TINY, groups, read, on_tensor=lambda: events.append("alive"))
    assert events == ["alive", "read"] * sum(len(slot.hf_names) for slot in which)
    assert all(torch.equal(parameters[path], part) for path, part in shards.items())
