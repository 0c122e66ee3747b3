"""Scheduling must never show in the responses. Any order, batch, pool and preemption: test_turns.py, numerics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_tlt.errors import BackendError
from megatron_tlt.rollout.request import Prefill, Request
from megatron_tlt.rollout.sampler import gumbel_noise
from megatron_tlt.types import SamplingParams
from tests.helpers.engines import Job, random_jobs
from tests.helpers.fake_decoder import context_logits, fake_engine
from tests.helpers.stepping import run_out
from tests.helpers.tiny_models import row_key

V = 50
Responses = dict[tuple[int, int], tuple]


def response(request: Request) -> tuple:
    return request.output, request.finish_reason, np.float32(request.logprobs).tolist()


def naive_response(prompt: list[int], params: SamplingParams, prompt_id: int, index: int) -> list[int]:
    """One request by the definition, without masks and stop strings."""
    out: list[int] = []
    while len(out) < params.max_tokens:
        scores = torch.from_numpy(context_logits(np.array(prompt + out), V))
        if params.temperature > 0:
            key = row_key(params.seed, prompt_id, index, len(out))
            key -= (1 << 64) * (key >> 63)
            scores = scores / params.temperature + gumbel_noise(torch.tensor([key]), V)[0]
        out.append(int(scores.argmax()))
        if out[-1] in params.stop_token_ids or (out[-1] == 0 and not params.ignore_eos):
            break
    return out


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    return random_jobs(V, 12, seed=8, stops=[(), (7,)])


@pytest.fixture(scope="module")
def reference(jobs: list[Job]) -> Responses:
    expected: Responses = {}
    for prompt_id, prompt, params, n in jobs:
        for index in range(n):
            engine = fake_engine(max_running=1)
            engine.add(prompt, params, prompt_id, indices=[index])
            (request,) = run_out(engine)
            expected[prompt_id, index] = response(request)
    assert {e[1] for e in expected.values()} == {"stop", "length"}
    return expected


def test_alone_equals_the_definition(jobs: list[Job], reference: Responses):
    checked = 0
    for prompt_id, prompt, params, n in jobs:
        if params.stop or params.top_k or params.top_p < 1 or params.min_p:
            continue
        for index in range(n):
            assert reference[prompt_id, index][0] == naive_response(prompt, params, prompt_id, index)
            checked += 1
    assert checked > 5


@pytest.mark.parametrize("spare_blocks", [0, 400])
def test_given_tokens_continue_a_response(jobs: list[Job], reference: Responses, spare_blocks: int):
    """A request whose output begins with given tokens draws by the key of the position behind them."""
    engine = fake_engine(num_blocks=-(-max(len(j[1]) + j[2].max_tokens for j in jobs) // 4) + spare_blocks)
    for (prompt_id, index), (output, *_) in reference.items():
        _, prompt, params, _ = jobs[prompt_id]
        count = min(prompt_id % 3 + 1, len(output) - 1) if index else len(output) - 1
        if params.stop or count < 1:
            continue
        tokens = np.array(prompt + output[:count], np.int32)
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else {0})
        request = Request(
            tokens[: len(prompt)], params, prompt_id, index, order=100 * prompt_id + index, stop_token_ids=stops
        )
        request.output, request.logprobs, request.given = output[:count], [0.0] * count, ((0, count),)
        engine.scheduler.add(Prefill(tokens, [request]))
    finished = run_out(engine)
    assert len(finished) > 5
    assert (engine.take_stats().preemptions > 0) == (spare_blocks == 0)
    for request in finished:
        output, reason, logprobs = reference[request.prompt_id, request.sample_index]
        begin = request.given[0][1]
        assert (request.output, request.finish_reason) == (output, reason)
        assert np.float32(request.logprobs).tolist() == [0.0] * begin + logprobs[begin:]


def test_a_prompt_is_prefilled_once_and_its_full_blocks_are_shared():
    engine = fake_engine(max_running=16, block_size=4)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    engine.add(list(range(1, 39)), params, 0, indices=range(16))  # 9 full blocks and half of a tenth
    engine.step()
    assert engine.runner.decoder.prefilled == 38
    engine.step()
    assert engine.num_running == 16
    assert engine.blocks.num_blocks - engine.blocks.num_free == 9 + 16
    run_out(engine)
    assert engine.runner.decoder.prefilled == 38
    assert engine.blocks.num_free == engine.blocks.num_blocks


def test_first_come_first_served():
    engine = fake_engine(max_running=2)
    for i in range(6):
        engine.add([i + 1], SamplingParams(max_tokens=4, ignore_eos=True), i, indices=[0])
    order = []
    while not engine.is_idle:
        order += [r.prompt_id for r in engine.step()]
    assert order == [0, 1, 2, 3, 4, 5]


def test_prompts_that_an_engine_takes_are_admitted_at_once():
    """Else they would wait here for blocks of running requests, while another replica has room."""
    engine = fake_engine(num_blocks=12, block_size=4, max_running=64)
    taken = 0
    for _ in range(12):
        while engine.has_room:
            engine.add([1], SamplingParams(max_tokens=6, ignore_eos=True), taken, indices=[0])
            taken += 1
        engine.step()
        assert not engine.scheduler._waiting
    assert taken >= 12 and engine.scheduler.num_preemptions == 0


def test_the_latest_arrival_is_preempted():
    engine = fake_engine()
    for i in range(3):
        engine.add([1, 2], SamplingParams(max_tokens=30, ignore_eos=True), i, indices=[0])
    engine.step()
    engine.step()
    engine.scheduler.preempt()
    assert [r.prompt_id for r in engine.scheduler.rows.requests] == [0, 1]


@pytest.mark.parametrize(
    ("prompt", "params", "samples", "words"),
    [
        ([1] * 100, {"max_tokens": 29}, 1, ("100", "29", "129", "128")),
        ([1] * 20, {"max_tokens": 30}, 1, ("20", "30", "13", "10")),
        ([1] * 20, {"max_tokens": 20}, 2, ("11", "10")),
        ([], {"max_tokens": 5}, 1, ("0 prompt tokens",)),
        ([1], {"max_tokens": 0}, 1, ("max_tokens 0",)),
        ([1], {"temperature": -1.0}, 1, ("temperature = -1.0",)),
        ([1], {"top_k": -1}, 1, ("top_k = -1",)),
        ([1], {"top_p": 0.0}, 1, ("top_p = 0.0",)),
        ([1], {"min_p": 1.5}, 1, ("min_p = 1.5",)),
        ([1], {"stop": ("",)}, 1, ("empty stop string",)),
        ([1, 50], {"max_tokens": 2}, 1, ("vocabulary of 50",)),
    ],
)
def test_requests_that_can_never_run_are_refused_with_numbers(prompt, params, samples, words) -> None:
    engine = fake_engine(num_blocks=10, block_size=4)
    with pytest.raises(BackendError, match="prompt 3") as caught:
        engine.add(prompt, SamplingParams(**params), 3, indices=range(samples))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert engine.is_idle


def test_abort_returns_every_block(jobs: list[Job]):
    engine = fake_engine(budget=16)
    for prompt_id, prompt, params, n in jobs:
        engine.add(prompt, params, prompt_id, indices=range(n))
    for _ in range(7):
        engine.step()
    dropped = engine.abort_all()
    assert engine.is_idle
    assert engine.blocks.num_free == engine.blocks.num_blocks
    assert {r.finish_reason for r in dropped} == {"abort"}
