"""What every rollout backend keeps: the embedded engine; our TensorRT-LLM server around a toy that has the names of a
recorded contract; a real vLLM, where one is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_tlt.backends.build import build_backend
from megatron_tlt.backends.options import EngineOptions
from megatron_tlt.config.rollout import RolloutSection, SyncSection
from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.drafters.checkpoint import load_drafter
from megatron_tlt.errors import BackendError, SyncError
from megatron_tlt.interfaces import RolloutBackend
from megatron_tlt.sync.buckets import checksum
from megatron_tlt.types import GenerateCall, Prompt, Sample, SamplingParams, WeightBucket
from tests.helpers.fake_decoder import CharTokenizer
from tests.helpers.trtllm_engines import DRAFTER as TOY_DRAFTER
from tests.helpers.trtllm_engines import PROMPTS, SHAPES, start_backend, tensors
from tests.helpers.vllm_engines import (
    DRAFTER,
    MODEL,
    NEEDS_VLLM,
    RUNNING,
    SHAPE,
    demo_prompts,
    demo_weights,
    running_vllm,
)

SAMPLES = 4
PARAMS = SamplingParams(max_tokens=40)
ENGINES = ["embedded", "trtllm 1.2.1", "trtllm 1.3.0rc27", pytest.param("vllm", marks=NEEDS_VLLM)]


@dataclass
class Served:
    """An engine with what is needed to use it."""

    backend: Any  # RolloutBackend
    prompts: list[Prompt]
    tokenizer: Any
    ends: set[int]
    weights: Callable[[int], dict[str, Tensor]]  # of a policy, by seed
    drafter: Callable[[int], dict[str, Tensor]]
    most_running: int
    context: int
    versions: Iterator[int] = field(default_factory=lambda: count(100))

    def push(self, seed: int = 0, drafter: int | None = None) -> int:
        """A whole weight sync in two buckets, which may cut layers; its version."""
        version, named = next(self.versions), list(self.weights(seed).items())
        self.backend.begin_update(version)
        for part in (named[: len(named) // 2], named[len(named) // 2 :]):
            self.backend.update_weights(WeightBucket(version, part))
        if drafter is not None:
            self.backend.update_drafter(self.drafter(drafter), version)
        self.backend.finish_update()
        return version

    def responses(self, params: SamplingParams = PARAMS, **options: Any) -> dict[tuple[int, int], tuple[int, ...]]:
        samples = self.backend.generate(GenerateCall(self.prompts, params, SAMPLES, **options))
        return {(s.prompt_id, s.sample_index): tuple(s.token_ids) for s in samples}


def _toy(folder: Any, version: str) -> Served:
    backend = start_backend(folder, version=version, eagle=True, draft_len=3)
    weights, drafter = (lambda seed, shapes=s: tensors(shapes, seed) for s in (SHAPES, TOY_DRAFTER))
    return Served(backend, PROMPTS, CharTokenizer(), {0}, weights, drafter, 8, 64)


def _demo_drafter(seed: int) -> dict[str, Tensor]:
    generator, good = torch.Generator().manual_seed(seed), load_drafter(DRAFTER, SHAPE).weights
    return {name: t + 0.01 * torch.randn(t.shape, generator=generator) for name, t in good.items()}


def _demo(kind: str) -> Served:
    tokenizer = HFTokenizer(MODEL.path)
    if kind == "vllm":
        backend: RolloutBackend = running_vllm()
    else:
        speculation = SpeculationSection(drafter="eagle", drafter_path=str(DRAFTER), selector="fixed", draft_len=3)
        rollout = RolloutSection(max_running_requests=RUNNING, speculation=speculation)
        backend = build_backend(EngineOptions(rollout, MODEL, SyncSection(verify=True), tokenizer=tokenizer))
    prompts, ends = demo_prompts(tokenizer), set(tokenizer.eos_token_ids)
    return Served(backend, prompts, tokenizer, ends, demo_weights, _demo_drafter, RUNNING, MODEL.max_context)


@pytest.fixture(scope="module", params=ENGINES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    kind, _, version = request.param.partition(" ")
    if kind != "trtllm":
        yield _demo(kind)
        return
    folder = tmp_path_factory.mktemp("engine")
    found = _toy(folder, version)
    yield found
    found.backend.close()


def test_without_weights_it_does_not_generate(served: Served) -> None:
    assert served.backend.policy_version == -1
    with pytest.raises(BackendError, match="no weights yet"):
        served.responses()


def test_responses_are_complete_in_order_and_counted(served: Served) -> None:
    version, backend = served.push(), served.backend
    backend.take_stats()
    seen: list[tuple[int, int, int]] = []
    samples = backend.generate(GenerateCall(served.prompts, PARAMS, SAMPLES, lambda *figures: seen.append(figures)))
    ids = sorted(p.prompt_id for p in served.prompts)
    assert [(s.prompt_id, s.sample_index) for s in samples] == [(p, i) for p in ids for i in range(SAMPLES)]
    for s in samples:
        assert s.policy_version == version
        assert s.text == served.tokenizer.decode(s.token_ids)
        assert len(s.logprobs) == len(s.token_ids) * backend.capabilities.logprobs
        assert 1 <= len(s.token_ids) <= PARAMS.max_tokens
    assert len({tuple(s.token_ids) for s in samples}) > len(ids), "the temperature is not ignored"
    assert max(running for running, _, _ in seen) <= served.most_running
    assert len(samples) >= sum(seen[0][:2]) >= sum(seen[-1][:2]), "reports come by time: there may be one"
    assert max(sum(figures[:2]) for figures in seen) <= len(samples), "in flight; a fetched prompt adds to it"
    assert all(a[2] <= b[2] for a, b in pairwise(seen)), "tokens"
    stats, tokens = backend.take_stats(), sum(len(s.token_ids) for s in samples)
    assert (stats.generated_tokens, stats.finished_requests) == (tokens, len(samples))
    assert stats.prompt_tokens == sum(len(p.token_ids) for p in served.prompts)
    assert stats.seconds > 0 and stats.steps > 0 and stats.running_curve[-1][1] == 0
    assert 1 <= stats.speculation.accept_length <= 5 and stats.speculation.row_steps > 0
    assert backend.take_stats().generated_tokens == 0


def ends_of(samples: list[Sample]) -> set[str]:
    return {s.finish_reason for s in samples}


def test_responses_end_at_their_stops(served: Served) -> None:
    served.push()

    def response(**params: Any) -> list[Sample]:
        found: list[Sample] = served.backend.generate(GenerateCall(served.prompts, SamplingParams(**params), SAMPLES))
        return found

    samples = response(max_tokens=40)
    for s in samples:
        is_end = [token in served.ends for token in s.token_ids]
        assert not any(is_end[:-1])
        assert (s.finish_reason == "stop") == is_end[-1], "the stop token stays in the response"
        assert s.finish_reason == "stop" or len(s.token_ids) == 40
    assert ends_of(samples) == {"stop", "length"}
    assert {len(s.token_ids) for s in response(max_tokens=7, ignore_eos=True)} == {7}
    stop = samples[0].token_ids[2]
    for s in response(max_tokens=40, stop_token_ids=(stop,), ignore_eos=True):
        assert stop not in s.token_ids[:-1]
        assert (s.finish_reason == "stop") == (s.token_ids[-1] == stop)
    if not served.backend.capabilities.stop_strings:
        with pytest.raises(BackendError, match="stops at tokens only"):
            response(max_tokens=7, stop=("x",))
        return
    string = samples[0].text[9:12]
    for whole, cut in zip(samples, response(max_tokens=40, stop=(string,)), strict=True):
        texts = [served.tokenizer.decode(whole.token_ids[:n]) for n in range(1, len(whole.token_ids) + 1)]
        length = next((n for n, text in enumerate(texts, 1) if string in text), None)
        end = whole.text.find(string) + len(string) if length else None
        expected = (whole.token_ids[:length], "stop" if length else whole.finish_reason, whole.text[:end])
        assert (cut.token_ids, cut.finish_reason, cut.text) == expected


def test_a_push_serves_all_of_it_or_nothing(served: Served) -> None:
    backend, before = served.backend, served.push(seed=1)
    one = served.responses()
    named = list(served.weights(2).items())
    backend.begin_update(999)
    backend.update_weights(WeightBucket(999, named[:1]))
    with pytest.raises(SyncError, match="a bucket of version 998 came into the weight sync of 999"):
        backend.update_weights(WeightBucket(998, named[1:]))
    with pytest.raises(SyncError, match="engine expects"):
        backend.update_weights(WeightBucket(999, [(named[0][0], torch.ones(1, 1, 1))]))
    with pytest.raises(BackendError, match="torn: the weight sync of version 999 has not finished"):
        served.responses()
    with pytest.raises(SyncError, match="version 999 lacks "):
        backend.finish_update()
    assert backend.policy_version == before
    version = served.push(seed=2)  # a later push heals it
    assert backend.policy_version == version
    assert backend.weight_checksums() == {name: checksum(tensor) for name, tensor in named}
    other = served.responses()
    served.push(seed=1)
    assert served.responses() == one != other, "a function of the weights"


def test_a_drafter_comes_with_a_push_or_not_at_all(served: Served) -> None:
    backend, first = served.backend, served.push(drafter=1)
    one = served.responses()
    with pytest.raises(SyncError, match="no weight sync is open"):
        backend.update_drafter(served.drafter(2), first + 1)
    backend.begin_update(999)
    partial = dict(list(served.drafter(2).items())[:1])
    with pytest.raises(SyncError, match="drafter of version 999"):
        backend.update_drafter(partial, 999)
    backend.begin_update(1000)
    backend.update_drafter(served.drafter(2), 1000)
    served.push()  # the one before is given up, and its drafter
    served.push(drafter=3)
    assert served.responses() == one, "responses do not depend on the drafter"


@pytest.mark.parametrize("how", ["too long", "interrupted"])
def test_what_fails_leaves_nothing_behind(served: Served, how: str) -> None:
    served.push()
    whole, steps = served.responses(), count()

    def interrupt(*_: int) -> None:
        if next(steps) == 1:
            raise KeyboardInterrupt

    if how == "interrupted":
        with pytest.raises(KeyboardInterrupt):
            served.responses(on_progress=interrupt)
    else:
        long = Prompt(77, "q", served.prompts[0].token_ids[:1] * (served.context - 5), "")
        with pytest.raises(BackendError, match=f"prompt 77: .* exceed the context of {served.context}"):
            served.backend.generate(GenerateCall([*served.prompts, long], PARAMS, 2))
    seen: list[tuple[int, int, int]] = []
    assert served.responses(on_progress=lambda *figures: seen.append(figures)) == whole
    assert sum(seen[0][:2]) <= len(whole), "requests of the call before are gone"


def test_responses_that_are_there_are_left_out(served: Served) -> None:
    served.push()
    whole, have = served.responses(), [(served.prompts[0].prompt_id, 0), (served.prompts[1].prompt_id, 2)]
    taken: list[Sample] = []
    left = served.responses(have=have, on_response=taken.append)
    assert left == {key: response for key, response in whole.items() if key not in have}
    assert {(s.prompt_id, s.sample_index): tuple(s.token_ids) for s in taken} == left


def test_memory_that_was_given_back_is_taken_again(served: Served) -> None:
    served.push()
    whole = served.responses()
    for _ in range(2):
        served.backend.release()
    assert served.responses() == whole
    for _ in range(2):
        served.backend.resume()
    assert served.responses() == whole


def test_a_closed_engine_does_not_generate(served: Served) -> None:
    if not isinstance(served.tokenizer, CharTokenizer) and served.backend.capabilities.logprobs is False:
        pytest.skip("vLLM closes as every engine in another process, and serves the next test's file")
    for _ in range(2):
        served.backend.close()
    with pytest.raises(BackendError, match="closed"):
        served.responses()
