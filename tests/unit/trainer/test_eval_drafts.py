"""Evaluations draft with the responses of the last one: real engines, whose policy changes in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_tlt.backends.embedded import EmbeddedBackend
from megatron_tlt.config.run import EvalSection
from megatron_tlt.data.prompt_queue import PromptQueues
from megatron_tlt.sync.served_weights import ServedWeights
from megatron_tlt.trainer.evaluation import EvalResult, Evaluator
from megatron_tlt.types import GenerateCall, Prompt, RewardResult, Sample, SampleGroup, SamplingParams
from tests.helpers.engines import small_config, speculating_engine
from tests.helpers.fake_decoder import FakeTurns
from tests.helpers.thread_ranks import ThreadRank, on_ranks
from tests.helpers.tiny_models import random_weights

CONFIG, RUNNING, SAMPLES = small_config("qwen3"), 6, 2
WEIGHTS, NOISE = random_weights(CONFIG, seed=5), random_weights(CONFIG, seed=6)
POLICIES = [[(n, w + step * z) for (n, w), (_, z) in zip(WEIGHTS, NOISE, strict=True)] for step in (0.0, 0.03, 0.06)]
PROMPTS = [Prompt(i, f"q{i}", tuple(range(3, 6 + i)), "") for i in range(12)]
PLENTY = 1 << 20
Drafts = dict[tuple[int, int], np.ndarray]


class World(ThreadRank):
    """One of the ranks that are threads."""

    def __init__(self, rank: ThreadRank, counters: list[Any]):
        super().__init__(rank.rank, rank._shared, rank._barrier)
        self._counters = iter(counters)

    def new_counter(self) -> Callable[[int], int]:
        shared = next(self._counters)
        return lambda more: next(shared)

    def heartbeat(self, **figures: Any) -> None:
        """Not checked here."""


class Rewards:
    """Judges by the tokens; keeps what it has judged."""

    def __init__(self) -> None:
        self.judged: dict[tuple[int, int], Sample] = {}

    def score(self, groups: list[SampleGroup]) -> None:
        for group in groups:
            sums = [sum(sample.token_ids) for sample in group.samples]
            group.rewards = [RewardResult(total / 7, total % 2 == 0) for total in sums]
            self.judged |= {(s.prompt_id, s.sample_index): s for s in group.samples}


@dataclass
class Evaluations:
    """What one rank saw, by evaluation."""

    results: list[EvalResult] = field(default_factory=list)
    drafts: list[Drafts] = field(default_factory=list)  # of its call
    accepted: list[int] = field(default_factory=list)  # tokens of drafts
    responses: list[dict[tuple[int, int], Sample]] = field(default_factory=list)


def evaluate(
    draft_bytes: int, size: int = 1, section: EvalSection | None = None, has_turns: bool = False
) -> list[Evaluations]:
    """Evaluations of every rank."""
    counters = [count(1) for _ in POLICIES]
    environments = SimpleNamespace(trajectories=lambda: FakeTurns(CONFIG.vocab_size, Random(3)))

    def work(rank: ThreadRank) -> Evaluations:
        world, rewards, seen = World(rank, counters), Rewards(), Evaluations()
        engine = speculating_engine(
            CONFIG, WEIGHTS, max_running=RUNNING, speculation={"drafter": "none", "selector": "fixed"}
        )
        backend = EmbeddedBackend(engine, ServedWeights({}, version=0))
        generate = backend.generate

        def watched(call: GenerateCall) -> list[Sample]:
            seen.drafts.append(dict(call.drafts))
            return generate(call)

        backend.generate = watched  # type: ignore[method-assign]
        queues = PromptQueues(world, 1, lambda value: value, RUNNING)  # type: ignore[arg-type]
        evaluator = Evaluator(
            PROMPTS,
            section or EvalSection(samples_per_prompt=SAMPLES),
            SamplingParams(max_tokens=40, max_turn_tokens=9 if has_turns else 0, seed=17),
            backend,
            rewards,  # type: ignore[arg-type]
            queues,
            environments if has_turns else None,  # type: ignore[arg-type]
            draft_bytes,
        )
        for version, policy in enumerate(POLICIES):
            engine.runner.decoder.load_weights(policy)
            rewards.judged = {}
            seen.results.append(evaluator.run(version))
            seen.accepted.append(backend.take_stats().speculation.pre_rolled_accepted)
            seen.responses.append(rewards.judged)
        return seen

    return on_ranks(size, work)


def together(ranks: list[Evaluations]) -> list[dict[tuple[int, int], Sample]]:
    by_evaluation = zip(*(rank.responses for rank in ranks), strict=True)
    return [{name: sample for part in parts for name, sample in part.items()} for parts in by_evaluation]


@pytest.mark.parametrize(("temperature", "size"), [(1.0, 1), (0.0, 2)])
def test_the_next_evaluation_accepts_the_last_ones_responses_and_is_the_same(temperature: float, size: int):
    section = EvalSection(samples_per_prompt=SAMPLES, temperature=temperature)
    plain, drafted = evaluate(0, size, section), evaluate(PLENTY, size, section)
    assert together(plain) == together(drafted)
    assert [repr(r.results) for r in plain] == [repr(r.results) for r in drafted]
    first, second, _ = together(drafted)
    assert len(first) == len(PROMPTS) * SAMPLES and first != second, "the policy has changed"
    assert not any(rank.drafts[1] or any(rank.accepted) for rank in plain)
    for rank in drafted:
        assert not rank.drafts[0] and not rank.accepted[0]
        kept = {name: tokens.tolist() for name, tokens in rank.drafts[1].items()}
        assert kept == {name: sample.token_ids for name, sample in first.items()}, "whichever rank drew them"
    for evaluation in (1, 2):
        assert sum(rank.accepted[evaluation] for rank in drafted) > 100


def test_turns_of_environments_draft_too():
    (plain,), (drafted,) = evaluate(0, has_turns=True), evaluate(PLENTY, has_turns=True)
    assert plain.responses == drafted.responses and repr(plain.results) == repr(drafted.results)
    assert any(sample.given for sample in drafted.responses[1].values()) and drafted.accepted[1] > 50


@pytest.mark.parametrize("size", [1, 2])
def test_the_longest_responses_are_kept_as_far_as_the_bytes_go(size: int):
    ranks, bound = evaluate(1200, size), 1200
    kept = ranks[0].drafts[1]
    assert 0.7 * bound < sum(tokens.nbytes for tokens in kept.values()) <= bound
    lengths = {name: len(sample.token_ids) for name, sample in together(ranks)[0].items()}
    left_out = lengths.keys() - kept.keys()
    assert min(lengths[n] for n in kept) >= max(lengths[n] for n in left_out), "whichever replica drew them"
    assert all(rank.drafts[1].keys() == kept.keys() for rank in ranks)
    assert together(ranks) == together(evaluate(0, size))
