"""A call that is ended between two steps, and calls whose drafts are the responses of another call."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from megatron_tlt.errors import BackendError
from megatron_tlt.types import GenerateCall, Sample, SamplingParams
from tests.helpers.fake_decoder import PROMPTS, CharTokenizer, FakeTurns, fake_backend
from tests.helpers.thread_ranks import ThreadRank, on_ranks
from tests.unit.backends.vllm.test_turns import EngineProcess, make_backend, name

V, SAMPLES = 50, 3
PARAMS = SamplingParams(max_tokens=40, temperature=0.7, top_k=5, stop=("ab", "c"), seed=5)
CALL = GenerateCall(PROMPTS, PARAMS, SAMPLES)
DRAFTERS = ["none", "suffix"]


def after(steps: int, call: GenerateCall = CALL) -> GenerateCall:
    asked = count(1)
    return replace(call, until=lambda: next(asked) > steps)


def drafts_of(samples: list[Sample]) -> dict[tuple[int, int], np.ndarray]:
    return {(s.prompt_id, s.sample_index): np.array(s.token_ids, np.int32) for s in samples}


@pytest.mark.parametrize(("drafter", "num_blocks"), [("none", 400), ("suffix", 400), ("none", 16)])
def test_a_call_ends_between_two_steps_with_what_is_there(drafter: str, num_blocks: int):
    whole = fake_backend(drafter="none").generate(CALL)
    by_name = {(s.prompt_id, s.sample_index): s for s in whole}
    backend, finished = fake_backend(drafter=drafter, num_blocks=num_blocks), list[Sample]()
    for steps in (0, 1, 2, 5, 17, 10000):
        finished.clear()
        samples = backend.generate(replace(after(steps), on_response=finished.append))
        stats = backend.take_stats()
        assert stats.steps <= steps and [running for _, running in stats.running_curve[-1:]] in ([], [0])
        ended = [s for s in samples if s.finish_reason != "abort"]
        assert sorted(map(str, ended)) == sorted(map(str, finished)), "the others are not reported"
        assert len(ended) == stats.finished_requests
        for sample in samples:
            right = by_name[sample.prompt_id, sample.sample_index]
            size = len(sample.token_ids)
            assert size > 0 and sample.token_ids == right.token_ids[:size] and sample.logprobs == right.logprobs[:size]
            assert sample.finish_reason == "abort" or sample == right
        assert backend.engine.is_idle and backend.engine.blocks.num_free == num_blocks
        assert backend.generate(replace(CALL, drafts=drafts_of(samples))) == whole
        stats = backend.take_stats()
        assert stats.speculation.pre_rolled_accepted > 0 or steps < 5
    assert samples == whole


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_begun_response_goes_on_by_its_draft(drafter: str):
    whole = fake_backend(drafter="none").generate(CALL)
    call, begun = replace(CALL, params=replace(PARAMS, max_call_tokens=5), drafts=drafts_of(whole)), {}
    backend, done = fake_backend(drafter=drafter), dict[tuple[int, int], Sample]()
    while len(done) < len(whole):
        for sample in backend.generate(replace(call, begun=begun, have=done)):
            (begun if sample.finish_reason == "carry" else done)[sample.prompt_id, sample.sample_index] = sample
    assert [done[s.prompt_id, s.sample_index].token_ids for s in whole] == [s.token_ids for s in whole]
    assert backend.take_stats().speculation.pre_rolled_accepted > 80


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_turns_draft_by_the_first_one(drafter: str):
    params = SamplingParams(max_tokens=60, max_turn_tokens=9, seed=17)
    call = GenerateCall(PROMPTS, params, SAMPLES)
    first_turns = fake_backend(drafter="none").generate(replace(call, params=replace(params, max_tokens=9)))
    found = []
    for drafts in ({}, drafts_of(first_turns)):
        backend = fake_backend(drafter=drafter)
        found.append(backend.generate(replace(call, turns=FakeTurns(V, delay=Random(3)), drafts=drafts)))
        assert bool(backend.take_stats().speculation.pre_rolled_accepted) == bool(drafts)
    assert found[0] == found[1]
    turns = FakeTurns(V, delay=Random(3))
    samples = fake_backend(drafter=drafter).generate(replace(after(12, call), turns=turns))
    assert not turns.live and {s.finish_reason for s in samples} >= {"abort"}


def test_ranks_of_an_engine_end_together():
    """The first rank is asked."""

    def work(tp: ThreadRank) -> list[Sample]:
        backend = fake_backend(drafter="none", tp=tp)
        call = after(3) if tp.rank == 0 else replace(CALL, until=lambda: pytest.fail("asked on another rank"))
        samples = backend.generate(call)
        assert backend.engine.is_idle and 8 < backend.take_stats().steps <= 3 * backend.engine.common_every
        return samples

    first, second = on_ranks(2, work)
    assert first == second and first


def test_a_call_of_an_engine_in_a_process_ends_with_what_is_there_and_its_drafts_get_there(tmp_path: Path):
    whole = {name(s): replace(s, logprobs=[]) for s in fake_backend(drafter="none").generate(CALL)}
    for polls in (0, 1, 9, 10000):
        process, finished = EngineProcess(tmp_path), list[Sample]()
        backend = make_backend(process)
        samples = backend.generate(replace(after(polls), on_response=finished.append))
        assert [s for s in samples if s.finish_reason != "abort"] == sorted(finished, key=name)
        for sample in samples:
            right, size = whole[name(sample)], len(sample.token_ids)
            assert size > 0 and sample.token_ids == right.token_ids[:size]
            assert sample == right or sample.finish_reason == "abort"
            assert sample == right or sample.text == CharTokenizer().decode(sample.token_ids)
        stats = backend._stats
        assert not process.requests and not process.responses and not list(tmp_path.iterdir())
        assert stats.generated_tokens == sum(len(s.token_ids) for s in samples)
        assert stats.finished_requests == len(finished) and stats.running_curve[-1][1] == 0
        drafts = drafts_of(samples)
        assert backend.generate(replace(CALL, drafts=drafts)) == list(whole.values())
        assert process.pre_rolled == {name: tokens.tolist() for name, tokens in drafts.items()}
    assert len(samples) == len(whole)


def test_first_turns_get_to_an_engine_in_a_process_with_first_turns_only(tmp_path: Path):
    drafts = {(prompt.prompt_id, i): np.full(3, 7, np.int32) for prompt in PROMPTS for i in range(SAMPLES)}
    brought = []

    class Watched(EngineProcess):
        def send(self, message: dict[str, Any]) -> None:
            brought.append((message["start"], "pre_rolled" in message))
            super().send(message)

    expected = fake_backend(drafter="none").generate(replace(CALL, turns=FakeTurns()))
    samples = make_backend(Watched(tmp_path)).generate(replace(CALL, turns=FakeTurns(), drafts=drafts))
    assert samples == [replace(sample, logprobs=[]) for sample in expected]
    assert {start == 0 for start, is_first in brought if is_first} == {True}
    assert len(drafts) == sum(start == 0 for start, _ in brought) < len(brought)
    assert all(is_first for start, is_first in brought if start == 0)


@pytest.mark.parametrize("call", [after(3), replace(CALL, drafts={(0, 0): np.ones(2, np.int32)})])
def test_an_engine_that_verifies_no_drafts_refuses_them(tmp_path: Path, call: GenerateCall):
    backend = make_backend(EngineProcess(tmp_path))
    backend.capabilities = replace(backend.capabilities, pre_rollouts=False)
    with pytest.raises(BackendError, match="verifies no drafts of a call"):
        backend.generate(call)
