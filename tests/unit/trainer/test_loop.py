"""What one rank of the loop does with scored responses."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from megatron_tlt.algorithms.build import build_algorithm
from megatron_tlt.config.algorithm import AlgorithmSection
from megatron_tlt.config.root import Config
from megatron_tlt.idle.window import WindowReport
from megatron_tlt.trainer.loop import RLTrainer
from megatron_tlt.types import PastResponse, Prompt, RewardResult, Sample, SampleGroup

PROMPTS = [Prompt(i, f"q{i}", (1, 2), "?") for i in range(3)]


class OneRank:
    rank, size = 0, 1

    def enter(self, name: str, step: int) -> None:
        """No board."""

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]


class Backend:
    """Keeps the responses of its history."""

    history_responses, policy_version = 8, 0

    def __init__(self) -> None:
        self.history: list[PastResponse] = []

    def remember(self, responses: list[PastResponse]) -> None:
        self.history += responses


class Rollout:
    """Two responses of one token to each prompt."""

    queues, is_cut_short = SimpleNamespace(is_first=True), False

    def generate(self, prompts: list[Prompt]) -> list[SampleGroup]:
        return [
            SampleGroup(p, [Sample(p.prompt_id, i, [7], [-1.0], "", "stop", 0) for i in range(2)])
            for p in prompts
        ]


class Rewards:
    """Of prompt 1 one response is right, of the others both."""

    def score(self, groups: list[SampleGroup]) -> None:
        for group in groups:
            right = [group.prompt.prompt_id != 1 or s.sample_index == 0 for s in group.samples]
            group.rewards = [RewardResult(float(r), r) for r in right]


def test_responses_that_are_not_trained_on_are_remembered_too() -> None:
    section = AlgorithmSection(dynamic_sampling=True, max_sampling_rounds=1)
    config = Config.model_validate(
        {"model": {"path": "m"}, "algorithm": section, "train": {"prompts_per_step": 3}}
    )
    backend = Backend()
    unused = ("assembler", "policy", "sync", "evaluator", "checkpoints", "nonfinite")
    trainer = RLTrainer(
        config=config,
        world=OneRank(),
        prompts=SimpleNamespace(next_batch=lambda n: PROMPTS[:n]),
        backend=backend,
        rollout=Rollout(),
        idle_window=SimpleNamespace(begin=lambda: None, run=lambda step_fn: WindowReport((), 0, 0, 0, 0, 0, 0)),
        drafter=SimpleNamespace(begin_step=lambda version: None, train_step=None),
        rewards=Rewards(),
        algorithm=build_algorithm(section, max_tokens=8),
        metrics=SimpleNamespace(span=lambda *_: nullcontext()),
        rollout_cache=SimpleNamespace(begin_step=lambda *_: None),
        shutdown=SimpleNamespace(sync=lambda *_: None),
        **dict.fromkeys(unused),
    )  # type: ignore[arg-type]
    groups = trainer._sample_groups()
    assert [g.prompt.prompt_id for g in groups] == [1]
    scores = [("q0", 1.0), ("q0", 1.0), ("q1", 1.0), ("q1", 0.0), ("q2", 1.0), ("q2", 1.0)]
    assert [(a.dataset_id, a.score) for a in backend.history] == scores
