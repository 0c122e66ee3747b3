"""A real vLLM on CPU behind `VllmBackend`: its answers are the embedded engine's, whatever drafts."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch import Tensor

from megatron_tlt.backends.build import build_backend
from megatron_tlt.backends.embedded import EmbeddedBackend
from megatron_tlt.backends.vllm.backend import VllmBackend
from megatron_tlt.config.rollout import RolloutSection
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.drafter.checkpoint import load_drafter
from megatron_tlt.errors import BackendError
from megatron_tlt.types import HiddenStateSample, Prompt, SamplingParams, WeightBucket
from tests.helpers.vllm_engines import (
    DRAFTER,
    MODEL,
    NEEDS_VLLM,
    SHAPE,
    demo_prompts,
    demo_weights,
    running_vllm,
)

pytestmark = list(NEEDS_VLLM)
SAMPLING = (
    SamplingParams(max_tokens=120),
    SamplingParams(max_tokens=120, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=5),
    SamplingParams(max_tokens=60, temperature=0.0),
)
Answers = dict[tuple[int, int], tuple[list[int], str]]


@pytest.fixture(scope="module")
def tokenizer() -> HFTokenizer:
    return HFTokenizer(MODEL.path)


@pytest.fixture(scope="module")
def prompts(tokenizer: HFTokenizer) -> list[Prompt]:
    return demo_prompts(tokenizer)


@pytest.fixture(scope="module")
def ours(tokenizer: HFTokenizer) -> EmbeddedBackend:
    """The embedded engine, without speculation."""
    return build_backend(RolloutSection(), MODEL, tokenizer=tokenizer, load_weights=True)


@pytest.fixture(scope="module")
def vllm() -> VllmBackend:
    return running_vllm()


def push(
    backend: EmbeddedBackend | VllmBackend,
    version: int,
    seed: int | None,
    drafter: dict[str, Tensor] | None = None,
) -> None:
    backend.begin_update(version)
    tensors = list(demo_weights(seed).items())
    for at in range(0, len(tensors), 20):  # buckets that cut layers in two
        backend.update_weights(WeightBucket(version, tensors[at : at + 20]))
    if drafter is not None:
        backend.update_drafter(drafter, version)
    backend.finish_update()


def answers(backend: EmbeddedBackend | VllmBackend, prompts: list[Prompt], params: SamplingParams) -> Answers:
    samples = backend.generate(prompts, params, 4)
    return {(s.prompt_id, s.sample_index): (s.token_ids, s.finish_reason) for s in samples}


def accept_length(backend: VllmBackend, prompts: list[Prompt]) -> float:
    backend.take_stats()
    answers(backend, prompts, SAMPLING[0])
    return backend.take_stats().speculation.accept_length


def test_answers_are_the_embedded_engines_after_every_push(
    ours: EmbeddedBackend, vllm: VllmBackend, prompts: list[Prompt]
) -> None:
    drafter = dict(load_drafter(DRAFTER, SHAPE).weights)
    noise = torch.Generator().manual_seed(0)
    bad = {n: torch.randn(t.shape, generator=noise) * 0.05 for n, t in drafter.items()}
    for version, seed, new in ((0, None, None), (1, 7, bad), (2, None, drafter)):
        push(ours, version, seed)
        push(vllm, version, seed, new)
        assert vllm.policy_version == version
        assert len(vllm.weight_checksums()) == len(SHAPE.parameter_shapes())
        for params in SAMPLING if version == 1 else SAMPLING[:1]:
            assert answers(vllm, prompts, params) == answers(ours, prompts, params), (version, params)
        assert (accept_length(vllm, prompts) > 1.5) == (new is not bad), "the drafter that was pushed drafts"
    assert answers(vllm, prompts[::-1], SAMPLING[0]) == answers(ours, prompts, SAMPLING[0])


def test_hidden_states_are_the_embedded_engines(
    ours: EmbeddedBackend, vllm: VllmBackend, prompts: list[Prompt]
) -> None:
    both: list[dict[tuple[int, int], HiddenStateSample]] = []
    for backend in (ours, vllm):
        push(backend, 3, 7)
        got: list[HiddenStateSample] = []
        backend.collect_hidden_states(got.append)
        answers(backend, prompts, SAMPLING[0])
        backend.collect_hidden_states(None)
        both.append({(s.prompt_id, s.sample_index): s for s in got})
    for mine_table, theirs_table in zip(ours.lookup_tables(), vllm.lookup_tables(), strict=True):
        assert torch.equal(mine_table, theirs_table)
    assert both[0].keys() == both[1].keys()
    assert len(both[0]) == 16
    for key, mine in both[0].items():
        theirs = both[1][key]
        assert theirs.token_ids.tolist() == mine.token_ids.tolist()
        fields = ("prompt_id", "sample_index", "policy_version", "prompt_len", "key")
        assert [getattr(theirs, f) for f in fields] == [getattr(mine, f) for f in fields]
        torch.testing.assert_close(theirs.hidden, mine.hidden, rtol=1e-4, atol=1e-4)


def test_a_killed_engine_is_named(vllm: VllmBackend, prompts: list[Prompt]) -> None:
    push(vllm, 4, None)
    os.kill(vllm.process.pid, signal.SIGKILL)
    with pytest.raises(BackendError, match=r"the vLLM engine .* was ended by signal 9; the end of its log"):
        vllm.generate(prompts, SAMPLING[0], 4)
    assert list(vllm._directory.path.iterdir()) == [], "files of hidden states are read once and removed"
