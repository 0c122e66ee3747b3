"""How many prompts a rollout has at once."""

from __future__ import annotations

import pytest

from megatron_tlt.types import GenerateCall, Prompt, SamplingParams
from tests.helpers.fake_decoder import FakeTurns, fake_backend


@pytest.mark.parametrize(("most", "found"), [(None, 8), (4, 4), (3, 4), (20, 8)])
def test_prompts_are_taken_while_fewer_requests_run_than_the_call_allows(most: int | None, found: int):
    backend = fake_backend()
    prompts = [Prompt(i, f"q{i}", (1,), "") for i in range(9)]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    samples = backend.generate(GenerateCall(prompts, params, num_samples=2, most_running=most))
    assert [(s.prompt_id, s.sample_index) for s in samples] == [(i, j) for i in range(9) for j in range(2)]
    assert max(n for _, n in backend.take_stats().running_curve) == found


@pytest.mark.parametrize("turns", [None, FakeTurns(most_turns=1)])
def test_the_first_prompts_fill_the_engine_before_a_token_is_drawn(turns: FakeTurns | None):
    backend = fake_backend(max_running=32)
    prompts = [Prompt(i, f"q{i}", (1,), "") for i in range(80)]
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    assert len(backend.generate(GenerateCall(prompts, params, turns=turns))) == 80
    assert next(running for _, running in backend.take_stats().running_curve if running) == 32
