"""How many prompts a rollout has at once."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.rollout.drive import Advance, Drive
from megatron_tlt.types import EngineStats, GenerateCall, Prompt, Sample, SamplingParams


class Engine:
    """Has room for 8 requests; each step ends the two oldest ones."""

    common_every, report_every_s = 1, 0.0

    def __init__(self) -> None:
        self.stats, self.requests, self.most = EngineStats(), list[Any](), 0

    num_waiting = 0
    num_running = property(lambda self: len(self.requests))
    has_work = property(lambda self: bool(self.requests))
    has_room = property(lambda self: len(self.requests) < 8)

    def begin(self, prompt: Prompt, params: SamplingParams, indices: Sequence[int], begun: Any, turns: bool) -> None:
        self.requests += [SimpleNamespace(at=(prompt.prompt_id, i), finish_reason="stop") for i in indices]
        self.most = max(self.most, len(self.requests))

    def advance(self, may_wait: bool) -> Advance:
        return Advance([self.requests.pop(0) for _ in range(2)])


@pytest.mark.parametrize(("most", "found"), [(None, 8), (4, 4), (3, 4), (20, 8)])
def test_prompts_are_taken_while_fewer_requests_run_than_the_call_allows(most: int | None, found: int):
    engine = Engine()
    prompts = [Prompt(i, f"q{i}", (1,), "") for i in range(9)]
    call = GenerateCall(prompts, SamplingParams(), num_samples=2, most_running=most)
    drive = Drive(engine, call, TensorParallel(), lambda r: Sample(*r.at, [], [], "", "stop", 0))  # type: ignore[arg-type]
    assert [(s.prompt_id, s.sample_index) for s in drive.run()] == [(i, j) for i in range(9) for j in range(2)]
    assert engine.most == found
