"""A real vLLM on CPU that drafts from earlier responses, right and wrong ones: it responds as the embedded engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from megatron_tlt.backends.build import build_backend
from megatron_tlt.backends.embedded import EmbeddedBackend
from megatron_tlt.backends.options import EngineOptions
from megatron_tlt.backends.vllm.backend import VllmBackend
from megatron_tlt.config.drafter_kinds import DrafterName
from megatron_tlt.config.rollout import RolloutSection
from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.drafters.checkpoint import load_drafter
from megatron_tlt.types import GenerateCall, HiddenStateSample, Sample, SamplingParams, SpeculationStats
from tests.helpers.vllm_engines import DRAFTER, MODEL, NEEDS_VLLM, RUNNING, SHAPE, demo_prompts, start_vllm
from tests.integration.test_vllm import assert_same_states, push

pytestmark = list(NEEDS_VLLM)
Drafts = dict[tuple[int, int], np.ndarray]
TOKENIZER = HFTokenizer(MODEL.path)
CALL = GenerateCall(demo_prompts(TOKENIZER), SamplingParams(max_tokens=120), 4)


@pytest.fixture(scope="module")
def ours() -> EmbeddedBackend:
    """The embedded engine, without speculation; its earlier responses are those of another policy."""
    return build_backend(EngineOptions(RolloutSection(), MODEL, tokenizer=TOKENIZER, keep_layers=()))


@pytest.fixture(scope="module", params=["none", "suffix", "eagle"])
def vllm(request: pytest.FixtureRequest) -> Iterator[VllmBackend]:
    """Every step verifies as much as it may."""
    kind: DrafterName = request.param
    section = SpeculationSection(drafter=kind, selector="fixed", draft_len=3)
    backend = start_vllm(load_drafter(DRAFTER, SHAPE) if section.trained else None, section, takes_drafts=True)
    yield backend
    backend.close()


def drafts_of(samples: list[Sample]) -> Drafts:
    return {(s.prompt_id, s.sample_index): np.array(s.token_ids, np.int32) for s in samples}


def generate(backend: VllmBackend, drafts: Drafts) -> tuple[list[Sample], SpeculationStats]:
    backend.take_stats()
    samples = backend.generate(replace(CALL, drafts=drafts))
    return samples, backend.take_stats().speculation


def plain(samples: list[Sample]) -> list[Sample]:
    return [replace(sample, logprobs=[]) for sample in samples]


def test_earlier_responses_change_nothing(ours: EmbeddedBackend, vllm: VllmBackend) -> None:
    for backend in (ours, vllm):
        push(backend, 0, 7)
    before = drafts_of(ours.generate(CALL))
    for backend in (ours, vllm):
        push(backend, 1, None)
    expected = plain(ours.generate(CALL))
    right = drafts_of(expected)
    others = dict(zip(right, [*list(right.values())[1:], right[0, 0]], strict=True))
    made = {
        "right": right,
        "of another policy": before,
        "of another response": others,
        "shifted": {name: tokens[3:] for name, tokens in right.items()},
        "cut": {name: tokens[:9] for name, tokens in right.items()},
        "foreign": {name: np.where(np.arange(len(tokens)) % 9, tokens, 10**6) for name, tokens in right.items()},
        "of some": {name: tokens for name, tokens in right.items() if sum(name) % 2},
        "none": {},
    }
    gained = {}
    for what, drafts in made.items():
        samples, stats = generate(vllm, drafts)
        assert samples == expected, what
        gained[what] = stats.pre_rolled_accepted / max(1, stats.pre_rolled_rows), stats.pre_rolled_accepted
    total = sum(len(tokens) for tokens in right.values())
    assert gained["right"][0] > 10 and gained["right"][1] > 0.8 * total
    assert gained["of another policy"][0] > gained["of another response"][0]
    assert 0 < gained["cut"][1] < gained["right"][1] and gained["none"] == (0, 0) < gained["of some"]


def test_hidden_states_are_those_of_plain_decoding(ours: EmbeddedBackend, vllm: VllmBackend) -> None:
    """Of positions that were verified, too."""
    drafts: Drafts = {}
    found = []
    for backend in (ours, vllm):
        push(backend, 2, None)
        states: list[HiddenStateSample] = []
        backend.collect_hidden_states(states.append)
        drafts = drafts_of(backend.generate(replace(CALL, drafts=drafts)))
        backend.collect_hidden_states(None)
        found.append({(s.trajectory.prompt_id, s.trajectory.sample_index): s for s in states})
    assert vllm.take_stats().speculation.pre_rolled_accepted > 0
    assert_same_states(*found)


def test_a_call_that_is_ended_brings_what_is_there_and_the_engine_is_idle(
    ours: EmbeddedBackend, vllm: VllmBackend
) -> None:
    for backend in (ours, vllm):
        push(backend, 3, None)
    expected = plain(ours.generate(CALL))
    by_name = {(s.prompt_id, s.sample_index): s for s in expected}
    asked = count()
    samples = vllm.generate(replace(CALL, until=lambda: next(asked) > 5))
    cut = [s for s in samples if s.finish_reason == "abort"]
    assert 0 < len(cut) <= RUNNING
    for sample in samples:
        right = by_name[sample.prompt_id, sample.sample_index]
        assert sample.token_ids and sample.token_ids == right.token_ids[: len(sample.token_ids)]
    assert generate(vllm, drafts_of(samples))[0] == expected
    assert generate(vllm, {})[0] == expected
