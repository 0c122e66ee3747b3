"""A real vLLM on CPU behind `VllmBackend`: its responses are the embedded engine's, whatever drafts."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_demo_policy import write_experts
from torch import Tensor

from megatron_tlt.backends.build import build_backend
from megatron_tlt.backends.embedded import EmbeddedBackend
from megatron_tlt.backends.options import EngineOptions
from megatron_tlt.backends.vllm.backend import VllmBackend
from megatron_tlt.config.block_drafters import BlockShape
from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.config.drafter_kinds import DrafterName
from megatron_tlt.config.lr_schedule import LearningRate
from megatron_tlt.config.model import ModelSection
from megatron_tlt.config.rollout import RolloutSection
from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.drafters.base import SavedDrafter
from megatron_tlt.drafters.checkpoint import load_drafter
from megatron_tlt.drafters.dspark.config import BlockConfig
from megatron_tlt.drafters.eagle.config import Eagle3Config, EagleConfig
from megatron_tlt.drafters.model import DrafterConfig
from megatron_tlt.drafters.registry import KINDS
from megatron_tlt.drafters.training.batching import DraftSequence, collate, epoch
from megatron_tlt.drafters.training.trainer import DrafterTrainer
from megatron_tlt.errors import BackendError
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.loader import weight_reader
from megatron_tlt.models.hf.writer import save_hf
from megatron_tlt.types import (
    GenerateCall,
    HiddenStateSample,
    Prompt,
    Sample,
    SamplingParams,
    SpeculationStats,
    WeightBucket,
)
from tests.helpers.fake_decoder import FakeTurns
from tests.helpers.tiny_drafters import random_drafter
from tests.helpers.tiny_models import moe_config, random_weights
from tests.helpers.vllm_engines import (
    ANY_LENGTH,
    DRAFTER,
    MODEL,
    NEEDS_VLLM,
    RUNNING,
    SHAPE,
    demo_prompts,
    demo_weights,
    running_vllm,
    start_vllm,
)

pytestmark = list(NEEDS_VLLM)
SAMPLING = (
    SamplingParams(max_tokens=120),
    SamplingParams(max_tokens=120, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=5),
    SamplingParams(max_tokens=60, temperature=0.0),
)
Responses = dict[tuple[int, int], tuple[list[int], str]]


@pytest.fixture(scope="module")
def tokenizer() -> HFTokenizer:
    return HFTokenizer(MODEL.path)


@pytest.fixture(scope="module")
def prompts(tokenizer: HFTokenizer) -> list[Prompt]:
    return demo_prompts(tokenizer)


@pytest.fixture(scope="module")
def ours(tokenizer: HFTokenizer) -> EmbeddedBackend:
    """The embedded engine, without speculation."""
    backend = build_backend(EngineOptions(RolloutSection(), MODEL, tokenizer=tokenizer))
    push(backend, 0, None)
    return backend


@pytest.fixture(scope="module")
def vllm() -> VllmBackend:
    return running_vllm()


def push(
    backend: EmbeddedBackend | VllmBackend,
    version: int,
    seed: int | None,
    drafter: dict[str, Tensor] | None = None,
    model: ModelSection = MODEL,
) -> None:
    backend.begin_update(version)
    tensors = list(demo_weights(seed, model.path).items())
    for at in range(0, len(tensors), 20):  # buckets that cut layers in two
        backend.update_weights(WeightBucket(version, tensors[at : at + 20]))
    if drafter is not None:
        backend.update_drafter(drafter, version)
    backend.finish_update()


def noisy(drafter: dict[str, Tensor]) -> dict[str, Tensor]:
    """A drafter of the same form that drafts nothing right."""
    generator = torch.Generator().manual_seed(0)
    return {
        n: torch.randn(t.shape, generator=generator) * 0.05 if t.is_floating_point() else t for n, t in drafter.items()
    }


def responses(backend: EmbeddedBackend | VllmBackend, prompts: list[Prompt], params: SamplingParams) -> Responses:
    samples = backend.generate(GenerateCall(prompts, params, 4))
    return {(s.prompt_id, s.sample_index): (s.token_ids, s.finish_reason) for s in samples}


def trajectories(backend: EmbeddedBackend | VllmBackend, prompts: list[Prompt], params: SamplingParams) -> list[Sample]:
    """With environments that answer late, in any order."""
    source = FakeTurns(SHAPE.vocab_size, random.Random(0), most_turns=3)
    samples = backend.generate(GenerateCall(prompts, params, 4, turns=source))
    assert len({len(sample.given) for sample in samples}) > 1 and not source.live
    return [replace(sample, logprobs=[]) for sample in samples]


def drafts(backend: EmbeddedBackend | VllmBackend, prompts: list[Prompt]) -> SpeculationStats:
    backend.take_stats()
    responses(backend, prompts, SAMPLING[0])
    return backend.take_stats().speculation


def test_responses_are_the_embedded_engines_after_every_push(
    ours: EmbeddedBackend, vllm: VllmBackend, prompts: list[Prompt]
) -> None:
    drafter = dict(load_drafter(DRAFTER, SHAPE).weights)
    bad, fresh = noisy(drafter), vllm.state_dict()
    for version, seed, new in ((0, None, None), (1, 7, bad), (2, None, drafter)):
        push(ours, version, seed)
        push(vllm, version, seed, new)
        assert vllm.policy_version == version
        assert len(vllm.weight_checksums()) == len(SHAPE.parameter_shapes())
        for params in SAMPLING if version == 1 else SAMPLING[:1]:
            assert responses(vllm, prompts, params) == responses(ours, prompts, params), (version, params)
        vllm.load_state_dict(fresh)  # the bandit explores as in its first steps
        made = drafts(vllm, prompts)
        assert min(made.steps_by_strategy[name] for name in ("trained_4", "trained_2", "none")) > 5
        assert (made.accept_length > 1.5) == (new is not bad), "the drafter that was pushed drafts"
    assert responses(vllm, prompts[::-1], SAMPLING[0]) == responses(ours, prompts, SAMPLING[0])


def collect(
    backend: EmbeddedBackend | VllmBackend, prompts: list[Prompt], run: Callable[..., Any] = responses
) -> dict[tuple[int, int], HiddenStateSample]:
    got: list[HiddenStateSample] = []
    backend.collect_hidden_states(got.append)
    run(backend, prompts, SAMPLING[0])
    backend.collect_hidden_states(None)
    return {(s.trajectory.prompt_id, s.trajectory.sample_index): s for s in got}


def assert_same_states(
    ours: dict[tuple[int, int], HiddenStateSample], others: dict[tuple[int, int], HiddenStateSample]
) -> None:
    assert ours.keys() == others.keys()
    assert len(ours) == 16
    for key, mine in ours.items():
        theirs = others[key]
        assert theirs.trajectory.token_ids.tolist() == mine.trajectory.token_ids.tolist() and theirs.key == mine.key
        fields = ("prompt_id", "sample_index", "policy_version", "response_start", "given", "finish_reason")
        assert [getattr(theirs.trajectory, f) for f in fields] == [getattr(mine.trajectory, f) for f in fields]
        torch.testing.assert_close(theirs.hidden, mine.hidden, rtol=1e-4, atol=1e-4)


def test_turns_are_the_embedded_engines_and_their_states_are_whole(
    ours: EmbeddedBackend, vllm: VllmBackend, prompts: list[Prompt]
) -> None:
    """With a weight sync between two calls: nothing that an engine computed before it is used behind it."""
    found: dict[Any, list[Sample]] = {}

    def run(backend: EmbeddedBackend | VllmBackend, *_: Any) -> None:
        found[backend] = trajectories(backend, prompts, replace(SAMPLING[0], max_turn_tokens=25))

    before: list[Sample] = []
    for version, seed in ((6, None), (7, 7)):
        for backend in (ours, vllm):
            push(backend, version, seed)
            backend.take_stats()
        for table, other in zip(ours.lookup_tables(), vllm.lookup_tables(), strict=True):
            assert torch.equal(table, other)
        assert_same_states(collect(ours, prompts, run), collect(vllm, prompts, run))
        assert found[vllm] == found[ours] != before
        before = found[ours]
        mine, theirs = ours.take_stats(), vllm.take_stats()
        assert (mine.turns, mine.given_tokens) == (theirs.turns, theirs.given_tokens)
        assert theirs.speculation.drafted_tokens > 0


def trained(
    config: DrafterConfig, samples: list[HiddenStateSample], tables: tuple[Tensor, Tensor], path: str
) -> dict[str, Tensor]:
    """A drafter of the policy in `path` that drafts some tokens right and some not."""
    model, data = KINDS[config.kind].build_model(config), [DraftSequence.of(s) for s in samples]
    counts = torch.bincount(torch.cat([s.token_ids for s in data]), minlength=SHAPE.vocab_size)
    model.start_fresh(0, weight_reader(path, config.policy), tables[1], counts)
    section = DrafterSection(lr=5e-3, num_steps=70, draft_steps=2)
    rate = LearningRate(5e-3, 4, "cosine")
    trainer = DrafterTrainer(model, section, temperature=1.0, rate=rate)
    for seed in range(70):
        trainer.step(collate(epoch(data, 512, 256, np.random.default_rng(seed))[0]), tables)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("block", "lengths"),
    [
        (BlockShape(2, (1, 5, 9), 6, 32, 287, sample_from_anchor=True), ANY_LENGTH.model_dump(exclude={"drafter"})),
        (BlockShape(2, (1, 5, 9), 5, 0, 287, sample_from_anchor=False), {"selector": "fixed", "draft_len": 4}),
    ],
    ids=["dspark", "dflash"],
)
def test_a_block_drafter_drafts_as_in_the_embedded_engine(
    ours: EmbeddedBackend, tokenizer: HFTokenizer, prompts: list[Prompt], block: BlockShape, lengths: dict[str, Any]
) -> None:
    """Whole blocks are filled, whatever of them is verified; responses and states are those without one."""
    config = BlockConfig.of(SHAPE, block)
    drafting = {"tokenizer": tokenizer, "keep_layers": config.aux_layers}
    plain = build_backend(EngineOptions(RolloutSection(), MODEL, **drafting))
    push(plain, 1, None)
    states = collect(plain, prompts)
    good = trained(config, list(states.values()), plain.lookup_tables(), MODEL.path)
    start = SavedDrafter(config, noisy(good))
    section = SpeculationSection(drafter="dspark", **lengths)
    beside = build_backend(
        EngineOptions(RolloutSection(speculation=section), MODEL, tokenizer=tokenizer, drafter=start)
    )
    theirs = start_vllm(start, section)
    for backend in (ours, beside, theirs):
        push(backend, 0, 7)
    assert responses(theirs, prompts, SAMPLING[0]) == responses(ours, prompts, SAMPLING[0])
    poor = theirs.take_stats().speculation.accept_length
    for backend in (beside, theirs):
        push(backend, 1, None, good)
    assert_same_states(states, collect(theirs, prompts))
    made = [drafts(backend, prompts) for backend in (beside, theirs)]
    assert made[0].accept_length > poor + 0.08, "a drafter that says nothing of acceptance"
    near = 0.03 if section.selector == "fixed" else 0.1  # with random lengths
    assert made[1].accept_length == pytest.approx(made[0].accept_length, rel=near)
    theirs.close()


def test_eagle3_and_experts_as_in_the_embedded_engine(
    tokenizer: HFTokenizer, prompts: list[Prompt], tmp_path: Path
) -> None:
    write_experts(Path(MODEL.path), tmp_path / "experts", seed=0)
    policy = ModelSection(path=str(tmp_path / "experts"), max_context=MODEL.max_context)
    config = Eagle3Config.of(ModelConfig.from_hf(policy.path), draft_vocab_size=60)
    plain = build_backend(EngineOptions(RolloutSection(), policy, tokenizer=tokenizer, keep_layers=config.aux_layers))
    push(plain, 1, None, model=policy)
    states = collect(plain, prompts)
    good = trained(config, list(states.values()), plain.lookup_tables(), policy.path)
    start = SavedDrafter(config, noisy(good))
    section = SpeculationSection(drafter="eagle", selector="fixed", draft_len=4)
    ours = build_backend(
        EngineOptions(
            RolloutSection(speculation=section), policy, tokenizer=tokenizer, drafter=start, keep_routed_experts=True
        )
    )
    theirs = start_vllm(start, section, policy, keep_routed_experts=True)
    for backend in (ours, theirs):
        push(backend, 0, 7, model=policy)
        assert drafts(backend, prompts).accept_length < 1.3
        push(backend, 1, None, good, policy)
        backend.take_stats()
    assert_same_states(states, collect(theirs, prompts))
    responses(ours, prompts, SAMPLING[0])
    lengths = [backend.take_stats().speculation.accept_length for backend in (ours, theirs)]
    assert lengths[0] > 1.4, "a drafter that says nothing of acceptance"
    assert lengths[1] == pytest.approx(lengths[0], rel=0.03)
    assert_same_routed_experts(*(backend.generate(GenerateCall(prompts, SAMPLING[0], 4)) for backend in (ours, theirs)))
    theirs.close()


def assert_same_routed_experts(ours: list[Sample], others: list[Sample]) -> None:
    """Each token's experts, whatever was drafted and rejected at its position; a request waited for a free slot."""
    assert len(ours) > RUNNING
    for mine, theirs in zip(ours, others, strict=True):
        assert mine.routed_experts is not None and theirs.routed_experts is not None
        assert theirs.routed_experts.dtype == mine.routed_experts.dtype and len(np.unique(mine.routed_experts)) > 4
        np.testing.assert_array_equal(theirs.routed_experts, np.sort(mine.routed_experts, -1))


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral"])
def test_other_families_with_experts(
    family: str, tokenizer: HFTokenizer, prompts: list[Prompt], tmp_path: Path
) -> None:
    shape = replace(moe_config(family, SHAPE.vocab_size), num_heads=2, num_kv_heads=1, head_dim=32)
    if family == "mixtral":
        shape = replace(shape, intermediate_size=shape.moe_intermediate_size, moe_layers=(0, 1))
    save_hf(tmp_path, shape, random_weights(shape), torch.float32)
    policy = ModelSection(path=str(tmp_path), tokenizer=MODEL.path, max_context=256)
    drafter = SavedDrafter(EagleConfig.of(shape), random_drafter(shape))
    ours = build_backend(EngineOptions(RolloutSection(), policy, tokenizer=tokenizer, keep_routed_experts=True))
    theirs = start_vllm(drafter, SpeculationSection(drafter="eagle"), policy, keep_routed_experts=True)
    for version, seed in enumerate((7, None)):
        for backend in (ours, theirs):
            push(backend, version, seed, model=policy)
    mine, found = (backend.generate(GenerateCall(prompts, SAMPLING[0], 4)) for backend in (ours, theirs))
    assert [s.token_ids for s in found] == [s.token_ids for s in mine]
    assert_same_routed_experts(mine, found)
    theirs.close()


@pytest.mark.parametrize("kind", ["suffix", "eagle"])
def test_responses_do_not_depend_on_preemption_or_on_which_drafter_drafts(
    ours: EmbeddedBackend, prompts: list[Prompt], kind: DrafterName
) -> None:
    """A cache that holds less than the running requests need: vLLM drops some and begins them again."""
    blocks, size = 18, 32  # vLLM keeps one, and needs 17 for the longest request
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    shortest = min(len(prompt.token_ids) for prompt in prompts) + params.max_tokens
    assert RUNNING * shortest > 2 * blocks * size, "not all of them fit, however they run"
    section = SpeculationSection(drafter=kind, selector="fixed", draft_len=3)
    drafter = load_drafter(DRAFTER, SHAPE) if section.trained else None
    theirs = start_vllm(drafter, section, block_size=size, num_gpu_blocks_override=blocks)
    for backend in (ours, theirs):
        push(backend, 5, None)
    assert responses(theirs, prompts, params) == responses(ours, prompts, params)
    of_turns = replace(params, max_turn_tokens=60)
    assert trajectories(theirs, prompts, of_turns) == trajectories(ours, prompts, of_turns)
    stats = theirs.take_stats().speculation
    assert stats.accept_length > 1 and stats.drafted_tokens > 0
    theirs.close()


def test_a_killed_engine_is_named(vllm: VllmBackend, prompts: list[Prompt]) -> None:
    push(vllm, 4, None)
    directory = vllm.process.shared.path
    left = {path.name for path in directory.iterdir()}
    assert left == {"socket", "megatron_tlt"}, "files of hidden states are read once and removed"
    os.kill(vllm.process.pid, signal.SIGKILL)
    with pytest.raises(BackendError, match=r"the vLLM engine .* was ended by signal 9; the end of its log"):
        vllm.generate(GenerateCall(prompts, SAMPLING[0], 4))
    assert not directory.exists()
