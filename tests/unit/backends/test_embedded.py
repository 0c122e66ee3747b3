"""Building the embedded backend; its drafter and history. What every backend keeps: integration/test_backends.py."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_tlt.backends.build import build_backend
from megatron_tlt.backends.embedded import EmbeddedBackend
from megatron_tlt.backends.options import EngineOptions
from megatron_tlt.config.model import ModelSection
from megatron_tlt.config.rollout import RolloutSection, SyncSection
from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.drafters.base import SavedDrafter
from megatron_tlt.drafters.eagle.config import EagleConfig
from megatron_tlt.drafters.eagle.model import EagleModel
from megatron_tlt.errors import ConfigError, SyncError
from megatron_tlt.models.hf.writer import save_hf
from megatron_tlt.trainer.models import push_policy
from megatron_tlt.types import GenerateCall, HiddenStateSample, PastResponse, Prompt, SamplingParams, WeightBucket
from tests.helpers.fake_decoder import CharTokenizer, fake_backend
from tests.helpers.tiny_models import TINY, random_weights

PROMPTS = [Prompt(3, "q3", (4, 5, 6), "def"), Prompt(1, "q1", (7, 8), "gh")]
PARAMS = SamplingParams(max_tokens=12)


def test_built_from_a_directory_and_pushed_to(model_dir: Path):
    rollout, model = RolloutSection(kv_cache_mib=4), ModelSection(path=str(model_dir), max_context=64)
    loaded = build_backend(EngineOptions(rollout, model, tokenizer=CharTokenizer()))
    push_policy(model.path, loaded)
    expected = loaded.generate(GenerateCall(PROMPTS, PARAMS, 2))
    pushed = build_backend(EngineOptions(rollout, model, SyncSection(verify=True), tokenizer=CharTokenizer()))
    pushed.begin_update(0)
    for name, tensor in random_weights(TINY):
        pushed.update_weights(WeightBucket(0, [(name, tensor)]))
    pushed.finish_update()
    assert pushed.generate(GenerateCall(PROMPTS, PARAMS, 2)) == expected
    assert pushed.weight_checksums().keys() == TINY.parameter_shapes().keys()
    assert loaded.engine.blocks.num_blocks == 4 * 2**20 // (2 * 2 * 16 * 16 * 4)


def test_hidden_states_are_stamped_with_the_version_that_answered(model_dir: Path):
    model = ModelSection(path=str(model_dir), max_context=64)
    backend = build_backend(EngineOptions(RolloutSection(kv_cache_mib=4), model, keep_layers=()))
    chunks: list[HiddenStateSample] = []
    backend.collect_hidden_states(chunks.append)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    for version in (3, 4):
        backend.begin_update(version)
        for name, tensor in random_weights(TINY):
            backend.update_weights(WeightBucket(version, [(name, tensor)]))
        backend.finish_update()
        backend.generate(GenerateCall(PROMPTS, params, 1))
    found = sorted((c.trajectory.prompt_id, c.trajectory.policy_version) for c in chunks)
    assert found == [(1, 3), (1, 4), (3, 3), (3, 4)]
    # 4 MiB hold as many blocks of keys, values and hidden states.
    assert backend.engine.blocks.num_blocks == 4 * 2**20 // (2 * 2 * 16 * 16 * 4 + 16 * 32 * 4)
    assert backend.engine.runner.pages.data.shape == (16 * backend.engine.blocks.num_blocks, 32)


def test_steps_with_pre_rollouts_have_as_many_rows_as_the_memory_plan_counts(model_dir: Path):
    rollout = RolloutSection(kv_cache_mib=4, max_running_requests=4)
    backend = build_backend(EngineOptions(rollout, ModelSection(path=str(model_dir), max_context=64)))
    assert backend.engine.speculator.pre_rollouts.most_rows == rollout.verify_rows < rollout.max_batched_tokens


def test_wrong_sizes_are_found_together(model_dir: Path):
    without_weights = RolloutSection(speculation=SpeculationSection(drafter="eagle"))
    with pytest.raises(ConfigError) as caught:
        build_backend(EngineOptions(without_weights, ModelSection(path=str(model_dir), max_context=257)))
    assert [p.path for p in caught.value.problems] == ["model.max_context", "rollout.speculation.drafter_path"]


def drafting_backend(model_dir: Path, drafter: EagleModel, selector: str = "fixed") -> EmbeddedBackend:
    speculation = SpeculationSection(drafter="eagle", selector=selector, draft_len=6)
    rollout = RolloutSection(kv_cache_mib=4, speculation=speculation)
    model = ModelSection(path=str(model_dir), max_context=64)
    backend = build_backend(EngineOptions(rollout, model, drafter=SavedDrafter(drafter.config, drafter.state_dict())))
    push(backend, 0)
    return backend


def test_rotary_tables_are_as_long_as_the_context(model_dir: Path):
    """And not as the positions of the model, of some a million; every rank has two."""
    backend = drafting_backend(model_dir, EagleModel(EagleConfig.of(TINY)))
    decoders = backend.engine.runner.decoder, backend.engine.speculator.trained.decoder
    assert [decoder._forward.model.rope_len for decoder in decoders] == [64, 64]
    params = SamplingParams(max_tokens=61, ignore_eos=True)  # behind 3 tokens: up to the last position
    assert [len(s.token_ids) for s in backend.generate(GenerateCall(PROMPTS, params, 2))] == [61] * 4


def push(backend: EmbeddedBackend, version: int, drafter: EagleModel | None = None) -> None:
    backend.begin_update(version)
    backend.update_weights(WeightBucket(version, list(random_weights(TINY))))
    if drafter is not None:
        backend.update_drafter(drafter.state_dict(), version)
    backend.finish_update()


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30, None])
def test_a_published_drafter_drafts_and_garbage_changes_nothing(model_dir: Path, garbage: float | None):
    drafter = EagleModel(EagleConfig.of(TINY))
    backend = drafting_backend(model_dir, drafter)
    expected = backend.generate(GenerateCall(PROMPTS, PARAMS, 4))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn_like(parameter) if garbage is None else torch.full_like(parameter, garbage))
    push(backend, 7, drafter)
    responses = backend.generate(GenerateCall(PROMPTS, PARAMS, 4))
    assert [(s.token_ids, s.logprobs) for s in responses] == [(s.token_ids, s.logprobs) for s in expected]
    stats = backend.take_stats().speculation
    assert stats.drafted_tokens > 0 or garbage is not None


def test_acceptance_counts_as_another_drafters_once_a_drafter_came(model_dir: Path):
    drafter = EagleModel(EagleConfig.of(TINY))
    backend = drafting_backend(model_dir, drafter, "cost_model")
    selector, rates = backend.engine.speculator.selector, backend.engine.speculator.trained._match_rates
    selector._is_new = False
    rates._counts[0, 0] = 1000.0, 0.0
    rates._estimate()
    measured = rates.rates[0, 0]
    push(backend, 1)
    assert not selector._is_new and rates.rates[0, 0] == measured
    push(backend, 2, drafter)
    assert selector._is_new and rates.rates[0, 0] > measured


def test_the_bandit_explores_anew_with_each_policy(model_dir: Path):
    backend = drafting_backend(model_dir, EagleModel(EagleConfig.of(TINY)), "beg_mab")
    backend.generate(GenerateCall(PROMPTS, PARAMS, 4))
    assert any(backend.engine.speculator.selector._steps)
    push(backend, 1)
    assert not any(backend.engine.speculator.selector._steps)


def test_an_engine_that_does_not_draft_refuses_a_drafter(model_dir: Path):
    model = ModelSection(path=str(model_dir), max_context=64)
    plain = build_backend(EngineOptions(RolloutSection(kv_cache_mib=4), model))
    plain.begin_update(1)
    with pytest.raises(SyncError, match="engine that has none"):
        plain.update_drafter({}, 1)


@pytest.mark.parametrize("drafter", ["none", "suffix"])
def test_a_resumed_backend_orders_prompts_alike(model_dir: Path, drafter: str):
    """The order is part of what a PyTorch decoder rounds by: a resumed run must repeat it."""
    rollout = RolloutSection(kv_cache_mib=4, speculation=SpeculationSection(drafter=drafter))
    model = ModelSection(path=str(model_dir), max_context=64)
    backends = [build_backend(EngineOptions(rollout, model)) for _ in range(2)]
    for backend in backends[:1]:
        push(backend, 0)
        backend.generate(GenerateCall(PROMPTS, PARAMS, 2))
        lengths = {"q3": 4, "q1": 9}
        backend.remember([PastResponse(q, np.zeros(n, np.int32), 1.0, 1) for q, n in lengths.items()])
    assert [p.dataset_id for p in backends[0].ordered(PROMPTS)] == ["q1", "q3"]
    assert [p.dataset_id for p in backends[1].ordered(PROMPTS)] == ["q3", "q1"]
    state = json.loads(json.dumps(backends[0].state_dict()))  # it stands in a checkpoint's manifest
    backends[1].load_state_dict(state | {"selector": {}})  # as checkpoints had it
    assert [p.dataset_id for p in backends[1].ordered(PROMPTS)] == ["q1", "q3"]


@pytest.mark.parametrize(("drafter", "wanted"), [("suffix", 1), ("none", 0)])
def test_tokens_of_earlier_responses_are_kept_only_where_they_are_read(model_dir: Path, drafter, wanted):
    rollout = RolloutSection(kv_cache_mib=4, speculation=SpeculationSection(drafter=drafter))
    backend = build_backend(EngineOptions(rollout, ModelSection(path=str(model_dir), max_context=64)))
    assert backend.history_responses == 8 * wanted
    backend.remember([PastResponse("q1", np.zeros(9, np.int32), 1.0, 1)])
    assert [p.dataset_id for p in backend.ordered(PROMPTS[::-1])] == ["q1", "q3"]
    assert len(backend._history.of("q1")) == wanted
    assert backend._history.expected_length("q1") == 9


def test_ranks_of_one_engine_agree_on_its_size(model_dir: Path, tmp_path: Path):
    """Ranks see different amounts of free memory; with pools of different sizes their schedulers would diverge."""

    class Rank:
        rank, size = 0, 2

        def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
            return torch.stack([tensor, tensor - 3])

    two_heads = replace(TINY, num_kv_heads=2)  # one on each of two ranks, as in the other model on one
    save_hf(tmp_path, two_heads, random_weights(two_heads))
    model, split = (ModelSection(path=str(path), max_context=64) for path in (model_dir, tmp_path))
    alone = build_backend(EngineOptions(RolloutSection(kv_cache_mib=4), model))
    shared = build_backend(EngineOptions(RolloutSection(kv_cache_mib=4, tp=2), split, tp=Rank()))
    assert shared.engine.blocks.num_blocks == alone.engine.blocks.num_blocks - 3


@pytest.mark.parametrize("seed", range(4))
def test_prompts_are_fetched_when_there_is_room_and_two_engines_give_the_responses_of_one(seed: int):
    """From pools so small that requests are preempted, too; the other engine has fetched some of the prompts."""
    rng, params = random.Random(seed), SamplingParams(max_tokens=24, seed=3, stop=("ab",))
    prompts = [Prompt(10 + i, f"q{i}", tuple(range(1, 3 + 2 * i)), "?") for i in range(8)]

    whole = fake_backend(max_running=64).generate(GenerateCall(prompts, params, 5))
    first, others, seen = fake_backend(max_running=4, num_blocks=rng.choice((18, 30, 400))), [], []

    def fetched() -> Iterator[Prompt]:
        for prompt in prompts:
            engine = first.engine
            seen.append(engine.num_running + engine.num_waiting)
            if rng.random() < 0.3:
                others.append(prompt)
            else:
                yield prompt

    mine = first.generate(GenerateCall(fetched(), params, 5))
    assert max(seen) < 4 and len(seen) == len(prompts)
    assert first.engine.blocks.num_free == first.engine.blocks.num_blocks
    theirs = fake_backend(max_running=3).generate(GenerateCall(others, params, 5))
    assert sorted([*mine, *theirs], key=lambda s: (s.prompt_id, s.sample_index)) == whole


def test_drafts_of_all_calls_are_kept_until_they_are_traced_anew():
    """Dynamic sampling may take several for one step."""
    backend, params = fake_backend(drafter="none"), SamplingParams(max_tokens=12, ignore_eos=True, seed=3)
    first, second = (
        GenerateCall([Prompt(i, f"q{i}", (3 + i, 4), "?") for i in ids], params, 1) for ids in ((0, 1), (2, 3))
    )
    calls = []
    for call in (first, second):
        tokens = {(s.prompt_id, 0): np.array(s.token_ids, np.int32) for s in backend.generate(call)}
        calls.append(replace(call, drafts=tokens))
    backend.trace_drafts(1)
    samples = [sample for call in calls for sample in backend.generate(call)]
    assert [backend.drafts_of(sample) is not None for sample in samples] == [True, False, True, False]
    backend.trace_drafts(1)
    assert backend.drafts_of(samples[0]) is None
