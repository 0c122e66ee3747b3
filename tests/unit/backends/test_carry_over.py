"""A response that several calls draw is the one that a single call draws, in every engine that continues requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_tlt.backends.base import BaseBackend
from megatron_tlt.types import GenerateCall, HiddenStateSample, Sample, SamplingParams
from tests.helpers.fake_decoder import PROMPTS, fake_backend
from tests.unit.backends.vllm.test_turns import EngineProcess, make_backend, name

SAMPLES = 3
MASKED = SamplingParams(max_tokens=40, temperature=0.7, top_k=5, stop_token_ids=(7, 8), seed=5)
STOPS = SamplingParams(max_tokens=25, stop=("ab", "xyz", "c"), temperature=1.5, seed=5)


def embedded(folder: Path) -> BaseBackend:
    return fake_backend()


def drafting(folder: Path) -> BaseBackend:
    return fake_backend(drafter="suffix")


def remote(folder: Path) -> BaseBackend:
    return make_backend(EngineProcess(folder))


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize(
    ("make", "params"), [(embedded, MASKED), (embedded, STOPS), (drafting, MASKED), (drafting, STOPS), (remote, MASKED)]
)
def test_parts_make_the_whole(
    tmp_path: Path, make: Callable[[Path], BaseBackend], params: SamplingParams, size: int
) -> None:
    whole = make(tmp_path).generate(GenerateCall(PROMPTS, params, SAMPLES))
    backend, states = make(tmp_path), []  # type: ignore[var-annotated]
    backend.collect_hidden_states(states.append if make is remote else None)
    begun: dict[tuple[int, int], Sample] = {}
    done: dict[tuple[int, int], Sample] = {}
    call = GenerateCall(PROMPTS, replace(params, max_call_tokens=size), SAMPLES)
    for version in range(100):
        drawn = backend.generate(replace(call, have=done.keys(), begun=begun))
        assert {name(s) for s in drawn} == (begun.keys() if version else {name(s) for s in whole})
        for sample in drawn:
            earlier = begun[name(sample)].drawn_by if version else ()
            assert sample.drawn_by == (*earlier, (version, len(sample.token_ids) - version * size))
        check_states(states, drawn)
        begun = {name(s): s for s in drawn if s.finish_reason == "carry"}
        assert all(len(s.token_ids) == (version + 1) * size for s in begun.values())
        done |= {name(s): s for s in drawn if s.finish_reason != "carry"}
        if not begun:
            break
        backend._weights.begin(version + 1)
        backend._weights.commit()
    assert version == (max(len(s.token_ids) for s in whole) - 1) // size
    assert [replace(done[name(s)], earlier=(), policy_version=0) for s in whole] == whole
    assert {s.finish_reason for s in whole} == {"stop", "length"}


def check_states(states: list[HiddenStateSample], drawn: list[Sample]) -> None:
    """Where they are collected, those of unfinished responses too, and of all positions."""
    by_name = {name(s): s for s in drawn}
    for found in states:
        sample = by_name[found.trajectory.prompt_id, found.trajectory.sample_index]
        tokens = [*PROMPTS[sample.prompt_id].token_ids, *sample.token_ids]
        assert found.trajectory.token_ids.tolist() == tokens and found.hidden.shape[0] == len(tokens) - 1
    states.clear()
