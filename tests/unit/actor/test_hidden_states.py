"""What the actor's collector of hidden states chooses; what it reads is in tests/mpi."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_tlt.actor.hidden_states import ForwardStateCollector
from megatron_tlt.config.dims import Dims
from megatron_tlt.types import TrainSequence
from tests.helpers.tiny_drafters import trajectory


@pytest.mark.parametrize("stages", [1, 2])
def test_the_last_stage_holds_the_budget_of_one_rank(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the responses of all owners of its pipeline until they are sent."""
    monkeypatch.setattr(ForwardStateCollector, "_exchanged", lambda self: [s for s, _ in self._chosen])
    shape = SimpleNamespace(sequence_parallel=False, hidden_size=8, num_layers=2)
    module: Any = SimpleNamespace(config=shape, decoder=SimpleNamespace(layers=[]))
    groups: Any = SimpleNamespace(dims=Dims(pp=stages), at=SimpleNamespace(cp=0, tp=0), is_last_stage=False)
    taken: list[Any] = []
    budget = 4 * 9 * 8 * 4  # of four of the responses, of ten tokens each
    collector = ForwardStateCollector(module, groups, lambda *step: taken.append(step), budget, torch.float32)
    responses = [TrainSequence.of(trajectory(np.arange(10), 3, prompt_id=i)) for i in range(6)]
    with collector.collecting(responses, version=0):
        pass
    ((found, left_out),) = taken
    assert (len(found), left_out) == (4, 2)
