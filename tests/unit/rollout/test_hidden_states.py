"""Hidden states of whole responses, however they came about, are those of one plain pass over prompt and response.

After drafts, preemption and further turns: tests/numerics/test_hidden_states.py and test_turns.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_tlt.models.decoders.factory import build_decoder
from megatron_tlt.rollout.engine import Engine, GraphBudget
from megatron_tlt.rollout.hidden_states import HiddenStateCollector
from megatron_tlt.rollout.scheduler import SchedulerLimits
from megatron_tlt.types import HiddenStateSample, SamplingParams
from tests.helpers.engines import (
    Job,
    OracleDrafter,
    RandomSelector,
    attach,
    delay_reads,
    generate_all,
    make_engine,
    random_jobs,
    small_config,
    speculating_engine,
)
from tests.helpers.stepping import run_out
from tests.helpers.tiny_models import random_weights, read_hidden_states

CONFIG = small_config("qwen3")
WEIGHTS = random_weights(CONFIG, seed=5)
CHAIN = {"drafter": "eagle", "selector": "fixed", "draft_len": 4, "catch_up": 16}


def collecting(engine: Engine) -> list[HiddenStateSample]:
    samples: list[HiddenStateSample] = []
    engine.collect_hidden_states(HiddenStateCollector(samples.append))
    return samples


def check(engine: Engine, jobs: list[Job], samples: list[HiddenStateSample]) -> int:
    """Responses `jobs`; what was collected is complete and right. Returns how many rows were compared."""
    requests = [
        r for prompt_id, prompt, params, n in jobs for r in engine.add(prompt, params, prompt_id, indices=range(n))
    ]
    requests[0].given = ((0, 1),)
    run_out(engine)
    assert engine.blocks.num_free == engine.blocks.num_blocks
    by_request = {(c.trajectory.prompt_id, c.trajectory.sample_index): c for c in samples}
    expected = [r for r in requests if len(r.output) >= 2]
    assert len(by_request) == len(samples) == len(expected)
    texts = [[*r.prompt.tolist(), *r.output] for r in expected]
    decoder = engine.runner.decoder
    for request, text, want in zip(expected, texts, read_hidden_states(decoder, texts, 16, 512), strict=True):
        sample = by_request[request.prompt_id, request.sample_index]
        trajectory = sample.trajectory
        assert trajectory.token_ids.dtype == np.int32 and trajectory.token_ids.tolist() == text
        assert trajectory.given == request.given
        assert trajectory.logprobs.tolist() == np.float32(request.logprobs).tolist()
        assert (trajectory.response_start, sample.key) == (len(request.prompt), request.key)
        assert sample.hidden.dtype == decoder.dtype and sample.hidden.shape == (len(text) - 1, CONFIG.hidden_size)
        torch.testing.assert_close(sample.hidden, want[:-1], atol=1e-5, rtol=1e-5)
    return sum(len(c.hidden) for c in samples)


def test_short_responses_are_left_out() -> None:
    """The first token of a response may be its last; its request then never gets a row."""
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 2, 3)]
    jobs = [(i, [1, 2, 3, 4, 5 + i] * 4, p, 2) for i, p in enumerate(params)]
    engine = make_engine(CONFIG, WEIGHTS)
    samples = collecting(engine)
    generate_all(engine, jobs)
    assert sorted(len(c.trajectory.logprobs) for c in samples) == [2, 2, 3, 3]
    texts = [c.trajectory.token_ids.tolist() for c in samples]
    for sample, want in zip(samples, read_hidden_states(engine.runner.decoder, texts, 16, 512), strict=True):
        assert torch.equal(sample.hidden, want[:-1])


def test_states_that_are_not_kept_are_not_read(monkeypatch) -> None:
    jobs, offered, samples, read = random_jobs(131, 6, seed=4), [], [], []  # type: ignore[var-annotated]
    delay_reads(monkeypatch, read.append)

    def offer(sample: HiddenStateSample) -> bool:
        assert sample.hidden.device.type == "meta" and sample.hidden.dtype == torch.float32
        offered.append((sample.trajectory.length - 1, CONFIG.hidden_size))
        return len(offered) % 2 > 0

    engine = make_engine(CONFIG, WEIGHTS)
    engine.collect_hidden_states(HiddenStateCollector(samples.append, offer=offer))
    generate_all(engine, jobs)
    assert [tuple(sample.hidden.shape) for sample in samples] == offered[::2]
    assert len(read) == len(samples) < len(offered)


def test_a_sink_that_raises_leaks_no_block() -> None:
    engine = make_engine(CONFIG, WEIGHTS)

    def refuse(sample: HiddenStateSample) -> None:
        raise RuntimeError("full")

    engine.collect_hidden_states(HiddenStateCollector(refuse))
    for max_tokens in (2, 4):
        engine.add([1, 2, 3], SamplingParams(max_tokens=max_tokens, ignore_eos=True), 0, indices=range(3))
        with pytest.raises(RuntimeError, match="full"):
            run_out(engine)
        engine.abort_all()
        assert engine.is_idle and engine.blocks.num_free == engine.blocks.num_blocks


def test_pages_are_kept_as_long_as_they_are_read() -> None:
    plain = make_engine(CONFIG, WEIGHTS)
    assert plain.runner.pages is None
    samples = collecting(plain)
    assert plain.runner.pages is not None
    plain.collect_hidden_states(None)
    assert plain.runner.pages is None
    generate_all(plain, random_jobs(131, 3))
    assert not samples
    drafting = speculating_engine(CONFIG, WEIGHTS, speculation=CHAIN)
    pages = drafting.runner.pages
    collecting(drafting)
    drafting.collect_hidden_states(None)
    assert pages is not None and drafting.runner.pages is pages
    drafting.add([1, 2, 3], SamplingParams(max_tokens=4), 0, indices=[0])
    with pytest.raises(AssertionError, match="hidden states"):
        collecting(drafting)


def test_graphs_write_their_states_too() -> None:
    """Steps of fixed shapes, padded; the states of real rows only are kept."""
    decoder = build_decoder(CONFIG, kernels="torch")
    decoder.load_weights(WEIGHTS)
    limits = SchedulerLimits(16, 128, 256, CONFIG.vocab_size)
    jobs = random_jobs(131, 6, seed=8)
    for attached in (False, True):
        engine = Engine(decoder, limits, 20, 16, eos_token_ids=(0,), graphs=GraphBudget(decoder, None, 512))
        if attached:
            attach(engine, OracleDrafter({}, 131, 0.0), RandomSelector("oracle", 4))
        assert check(engine, jobs, collecting(engine)) > 200
        assert engine.runner.pool.graphs.stats.eager > 0


def test_all_states_have_arrived_where_every_request_waits_for_its_environment(monkeypatch) -> None:
    """The drafter may train then, on all ranks of an engine with the same samples, however late their copies are."""
    delay_reads(monkeypatch, lambda left: None, polls=10**6)
    engine = make_engine(CONFIG, WEIGHTS)
    samples = collecting(engine)
    params = SamplingParams(max_tokens=40, max_turn_tokens=9, ignore_eos=True)
    engine.add([1, 2, 3], replace(params, max_tokens=3), 0, indices=[0])
    parked = engine.add([4, 5], params, 1, indices=range(2), takes_turns=True)
    while engine.has_work:
        assert not samples
        engine.step()
    assert len(samples) == 1 and not engine.is_idle
    assert engine.end(parked[0], "env") and len(samples) == 2 and not engine.is_idle


def test_states_that_arrive_late_are_emitted_in_order_and_before_the_engine_is_idle(monkeypatch) -> None:
    """As on a GPU: a copy is done some steps later, and the blocks have been written again by then."""

    jobs, waited = random_jobs(131, 12, seed=4), []
    engine = make_engine(CONFIG, WEIGHTS)
    plain = collecting(engine)
    generate_all(engine, jobs)
    delay_reads(monkeypatch, waited.append)
    engine = make_engine(CONFIG, WEIGHTS)
    samples = collecting(engine)
    generate_all(engine, jobs)
    orders = ([(s.trajectory.prompt_id, s.trajectory.sample_index) for s in found] for found in (samples, plain))
    assert next(orders) == next(orders)
    assert all(torch.equal(a.hidden, b.hidden) for a, b in zip(samples, plain, strict=True))
    assert len(waited) == len(samples) and max(waited) >= 0 > min(waited), "some were waited for, most were not"
