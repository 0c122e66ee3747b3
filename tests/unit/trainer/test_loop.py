"""What one rank of the loop does with judged answers."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_tlt.algorithms.build import build_algorithm
from megatron_tlt.config.algorithm import AlgorithmSection
from megatron_tlt.config.root import Config
from megatron_tlt.distributed.dims import Dims
from megatron_tlt.resilience.rollout_cache import NoRolloutCache
from megatron_tlt.trainer.batch_assembly import make_sequence
from megatron_tlt.trainer.loop import RLTrainer
from megatron_tlt.types import (
    EMBEDDED_CAPABILITIES,
    TRTLLM_CAPABILITIES,
    BackendCapabilities,
    PastAnswer,
    Prompt,
    RewardResult,
    Sample,
    SampleGroup,
    SamplingParams,
    TrainSequence,
)

PROMPTS = [Prompt(i, f"q{i}", (1, 2), "?") for i in range(3)]


class OneRank:
    rank, size = 0, 1

    def enter(self, name: str, step: int) -> None:
        """No board."""

    def pulse(self, **_: Any) -> None:
        """Nobody watches."""

    def barrier(self) -> None:
        """Nobody else."""

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]


class Backend:
    """Two answers of one token to each prompt; keeps what it is told."""

    wants_history, policy_version = True, 0

    def __init__(self) -> None:
        self.told: list[PastAnswer] = []

    def generate(self, prompts: list[Prompt], *_: Any) -> list[Sample]:
        return [Sample(p.prompt_id, i, [7], [-1.0], "", "stop", 0) for p in prompts for i in range(2)]

    def remember(self, answers: list[PastAnswer]) -> None:
        self.told += answers


class Rewards:
    """Of prompt 1 one answer is right, of the others both."""

    def score(self, groups: list[SampleGroup]) -> None:
        for group in groups:
            right = [group.prompt.prompt_id != 1 or s.sample_index == 0 for s in group.samples]
            group.rewards = [RewardResult(float(r), r) for r in right]


class Upkeep:
    """Nobody to wait for, nothing to train."""

    def begin_step(self, policy_version: int) -> None:
        """Nothing is too old."""

    def rollout(self, on_progress: Any) -> Any:
        return nullcontext(on_progress)

    def wait(self, samples: list[Sample]) -> None:
        """Nobody else."""


def test_answers_that_nobody_trains_on_are_remembered_too() -> None:
    section = AlgorithmSection(dynamic_sampling=True, max_sampling_rounds=1)
    config = Config.model_validate(
        {"model": {"path": "m"}, "algorithm": section, "train": {"prompts_per_step": 3}}
    )
    backend = Backend()
    parts: dict[str, Any] = {
        "prompts": SimpleNamespace(next_batch=lambda n: PROMPTS[:n]),
        "rewards": Rewards(),
        "algorithm": build_algorithm(section, max_tokens=8),
        "policy": SimpleNamespace(dims=Dims()),
        "backend": backend,
        "upkeep": Upkeep(),
        "metrics": SimpleNamespace(on_rollout=None, span=lambda *_: nullcontext()),
        "rollout_cache": NoRolloutCache(backend, SamplingParams(), 2),  # type: ignore[arg-type]
    }
    others = dict.fromkeys(("evaluator", "checkpoints"))
    trainer = RLTrainer(config, OneRank(), **parts, **others)  # type: ignore[arg-type]
    groups, table = trainer._rollout()
    assert [g.prompt.prompt_id for g in groups] == [1]
    assert len(table.mini_batch) == 2
    assert [(a.dataset_id, a.score) for a in backend.told] == [
        ("q0", 1.0),
        ("q0", 1.0),
        ("q1", 1.0),
        ("q1", 0.0),
        ("q2", 1.0),
        ("q2", 1.0),
    ]


def test_answers_of_an_engine_without_log_probs_are_scored_by_the_actor() -> None:
    config = Config.model_validate({"model": {"path": "m"}, "rollout": {"temperature": 0.5}})
    asked: list[Any] = []

    def logprobs(sequences: list[TrainSequence], temperature: float, which: str) -> list[np.ndarray]:
        asked.append((len(sequences), temperature, which))
        return [np.full(1, -float(s.prompt_id + 1)) for s in sequences]

    def scored(capabilities: BackendCapabilities) -> list[float]:
        group = SampleGroup(PROMPTS[1], [Sample(1, 0, [7], [], "", "stop", 0)])
        parts = [[make_sequence(group, group.samples[0])], [make_sequence(group, group.samples[0])]]
        others = dict.fromkeys(
            ("prompts", "rewards", "algorithm", "upkeep", "evaluator", "checkpoints", "metrics", "rollout_cache")
        )
        trainer = RLTrainer(
            config,
            OneRank(),
            policy=SimpleNamespace(dims=Dims(), logprobs=logprobs),
            backend=SimpleNamespace(capabilities=capabilities),
            **{**others, "algorithm": SimpleNamespace(config=AlgorithmSection())},
        )  # type: ignore[arg-type]
        trainer._score_answers(parts)
        return [float(s.rollout_logprobs[0]) for part in parts for s in part]

    assert scored(TRTLLM_CAPABILITIES) == [-2.0, -2.0]
    assert asked == [(2, 0.5, "policy")]
    assert np.isnan(scored(EMBEDDED_CAPABILITIES)).all(), (
        "left as they came: an engine with log-probs brings its own"
    )
    assert len(asked) == 1
