"""Sampling of one rank: the prompts that it fetches, its reports, and the use of all responses."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from megatron_tlt.algorithms.build import build_algorithm
from megatron_tlt.config.algorithm import AlgorithmSection
from megatron_tlt.config.root import Config
from megatron_tlt.data.prompt_queue import PromptQueues
from megatron_tlt.distributed.together import SingleProcess
from megatron_tlt.errors import RewardError, UnjudgedError
from megatron_tlt.idle.policy import tokens_left
from megatron_tlt.trainer.carry_over import CarriedGroups
from megatron_tlt.trainer.sampling import GroupSampler
from megatron_tlt.types import GenerateCall, PastResponse, Prompt, RewardResult, Sample, SampleGroup

PROMPTS = [Prompt(i, f"q{i}", (1, 2), "?") for i in range(6)]


class Ranks(SingleProcess):
    """World, engine, rollout cache and metrics of one rank; records what it is asked and what it reports."""

    history_responses, policy_version = 8, 0
    device = SimpleNamespace(type="cpu")

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size = rank, size
        self.lengths = [1, 1]  # of the responses to the first prompt
        self.heartbeats: list[dict[str, Any]] = []
        self.asked: list[list[int]] = []
        self.shown: list[tuple[int, int, int]] = []
        self.history: list[PastResponse] = []
        self.unwatched: list[str] = []
        self.traced: list[int] = []

    def lookup_tables(self) -> Any:
        """No drafter reads them."""

    def trace_drafts(self, num_prompts: int) -> None:
        self.traced.append(num_prompts)

    def new_counter(self) -> Any:
        return lambda more: len(PROMPTS)

    def heartbeat(self, **figures: Any) -> None:
        self.heartbeats.append(figures)

    def on_rollout(self, *figures: int) -> None:
        self.shown.append(figures)

    def phase(self, name: str) -> Any:
        return nullcontext()

    def end_window(self, report: Any, dropped_tokens: int) -> None:
        """No window."""

    def ordered(self, prompts: list[Prompt]) -> list[Prompt]:
        return prompts[::-1]

    def running_lengths(self) -> np.ndarray:
        return np.array([3, 5])

    def remember(self, responses: list[PastResponse]) -> None:
        self.history += responses

    def generate(self, call: GenerateCall) -> list[Sample]:
        self.asked.append([p.prompt_id for p in call.prompts])
        call.on_progress(2, 1, 10)
        drawn = []
        for at, i, length in ((at, i, length) for at in self.asked[-1] for i, length in enumerate(self.lengths)):
            start, most = call.begun.get((at, i)), call.params.max_call_tokens or length
            count = min(length, (0 if start is None else len(start.token_ids)) + most)
            sample = Sample(at, i, [7] * count, [-1.0] * count, "", "stop" if count == length else "carry", 0)
            sample.routed_experts = np.zeros((count, 1, 1), np.uint8)
            drawn += [] if (at, i) in call.have else [sample]
        return drawn


class Rewards:
    """To prompts 0 and 2 both responses are right, to the others one of them."""

    failure: str | None = None

    def score(self, groups: list[SampleGroup]) -> str | None:
        for group in groups:
            right = [group.prompt.prompt_id in (0, 2) or s.sample_index == 0 for s in group.samples]
            group.rewards = [RewardResult(float(r), r, failure=self.failure) for r in right]
        return self.failure


def sampler_of(
    ranks: Ranks, rounds: int = 1, wanted: int = 3, carry_over: int | None = None, repeats: bool = True
) -> GroupSampler:
    section = AlgorithmSection(dynamic_sampling=carry_over is None, max_sampling_rounds=rounds)
    rollout = {"samples_per_prompt": 2, "carry_over": carry_over}
    overrides = {"train": {"prompts_per_step": wanted}, "rollout": rollout}
    left = iter(PROMPTS)
    stream = SimpleNamespace(next_batch=lambda n: [next(left) for _ in range(n)], state_dict=dict, repeats=repeats)
    config = Config.model_validate({"model": {"path": "m"}, "algorithm": section, **overrides})
    return GroupSampler(
        config=config,
        carried=CarriedGroups(ranks, stream, config.rollout),
        queues=PromptQueues(ranks, 1, lambda ticket: ticket, None),
        backend=ranks,
        drafter=SimpleNamespace(collecting=nullcontext, begin_step=lambda version, tables: None, train_step=None),
        idle_window=SimpleNamespace(begin=lambda: None, run=lambda step_fn, pre_roll: None),
        rewards=Rewards(),
        algorithm=build_algorithm(section, max_tokens=8),
        prompts=stream,
        rollout_cache=SimpleNamespace(generate=ranks.generate, end_step=lambda: {"rollout_cache/reused": 0.0}),
        shutdown=SimpleNamespace(
            interruptible=lambda generate, call: (generate(call), False),
            sync=lambda *_: None,
            unwatched=lambda what: ranks.unwatched.append(what) or nullcontext(),
        ),
        metrics=ranks,
    )  # type: ignore[arg-type]


def test_progress_goes_to_watchdog_and_display() -> None:
    ranks = Ranks(rank=1, size=2)
    ranks.lengths, sampler = [7], sampler_of(ranks)
    groups, _ = sampler._generate(PROMPTS[:5])
    left = tokens_left(np.array([3, 5]), 1, np.array([256.0]))
    assert ranks.heartbeats == [{"state": "BUSY", "running": 2, "queued": 1, "longest": 5, "left": left}]
    assert ranks.shown == [(2, 1, 10)]
    assert ranks.asked == [[3, 1]], "the share of the second of two replicas, in the engine's order"
    assert [(g.prompt.prompt_id, len(g.samples)) for g in groups] == [(3, 1), (1, 1)]
    sampler._generate(PROMPTS[:5])
    assert ranks.heartbeats[-1]["left"] == tokens_left(np.array([3, 5]), 1, np.array([7.0, 7.0])), "of the last ones"


def test_responses_that_are_not_trained_on_are_remembered_too() -> None:
    ranks = Ranks()
    groups, _, metrics = sampler_of(ranks, rounds=1).sample(4)
    assert [g.prompt.prompt_id for g in groups] == [1] and metrics["rollout_cache/reused"] == 0
    scores = [("q0", 1.0), ("q0", 1.0), ("q1", 1.0), ("q1", 0.0), ("q2", 1.0), ("q2", 1.0)]
    assert [(a.dataset_id, a.score) for a in ranks.history] == scores


def test_responses_to_prompts_that_never_come_again_are_not_remembered() -> None:
    ranks = Ranks()
    groups, scored, _ = sampler_of(ranks, rounds=1, repeats=False).sample(4)
    assert (len(groups), len(scored), ranks.history) == (1, 3, [])


@pytest.mark.parametrize("wanted", [1, 2, 3])
def test_rounds_go_on_until_enough_groups_have_a_gradient(wanted: int) -> None:
    ranks = Ranks()
    sampler = sampler_of(ranks, rounds=5, wanted=wanted)
    sampler.traced_prompts = 2
    groups, *_ = sampler.sample(4)
    assert sorted(g.prompt.prompt_id for g in groups) == [1, 3, 4][:wanted] and len(ranks.asked) == 2
    assert ranks.traced == [2], "once a step: the drafts of all rounds are kept"
    assert ranks.unwatched == ["scoring"] * 2


def test_a_step_with_fewer_groups_than_wanted_says_how_many(caplog: pytest.LogCaptureFixture) -> None:
    short = "step 4: dynamic sampling kept 1 of 3 groups in 1 rollouts; it dropped 2 groups"
    for rounds, said in ((1, [short]), (2, [])):
        sampler_of(Ranks(), rounds=rounds).sample(4)
        assert [text.partition(" with equal")[0] for text in caplog.messages] == said
        caplog.clear()


def test_all_scored_groups_of_all_rounds_come_back_beside_those_to_train_on() -> None:
    """Those with equal rewards, as where an environment failed on all, and those beyond what a step trains on."""
    kept, scored, row = sampler_of(Ranks(), rounds=5, wanted=3).sample(4)
    assert sorted(g.prompt.prompt_id for g in kept) == [1, 3, 4]
    assert sorted(g.prompt.prompt_id for g in scored) == list(range(6)) and all(len(g.rewards) == 2 for g in scored)
    with_experts = {g.prompt.prompt_id for g in scored if g.samples[0].routed_experts is not None}
    assert with_experts == {1, 3, 4}, "of the update only"
    figures = {name: row[f"sampling/{name}_groups"].value for name in ("kept", "surplus", "dropped")}
    assert figures == {"kept": 3, "surplus": 1, "dropped": 2}, "together all that were scored"


def test_a_step_without_a_mixed_group_is_a_warning_and_figures(caplog: pytest.LogCaptureFixture) -> None:
    """Prompts 0 and 2 have one reward each, 1 has two."""
    ranks = Ranks()
    sampler = sampler_of(ranks, wanted=1)
    *_, row = sampler.sample(4)
    dropped = "1 groups with equal rewards, mean reward 1, 100.0% of responses correct: all right, prompts too easy"
    assert caplog.messages == [f"step 4: dynamic sampling kept 0 of 1 groups in 1 rollouts; it dropped {dropped}"]
    figures = {"rounds": 1, "kept_groups": 0, "surplus_groups": 0, "dropped_groups": 1}
    figures |= {"dropped_reward": 1, "dropped_accuracy": 1}
    assert {name.partition("/")[2]: row[name].value for name in row if name.startswith("sampling/")} == figures
    groups, *_ = sampler.sample(4)
    assert [g.prompt.prompt_id for g in groups] == [1]
    ranks.is_main = False
    *_, row = sampler_of(ranks, wanted=1).sample(4)
    assert not any(name.startswith("sampling/") for name in row), "of rank 0 alone: ranks' figures are added up"
    assert len(caplog.messages) == 1


def test_a_rollout_of_which_nothing_was_judged_ends_the_run(caplog: pytest.LogCaptureFixture) -> None:
    sampler = sampler_of(Ranks(), rounds=1)
    sampler.rewards.failure = "f: no such luck"  # type: ignore[attr-defined]
    with pytest.raises(UnjudgedError, match=r"^step 4: no response .* has a reward; .*: f: no such luck"):
        sampler.sample(4)
    assert not caplog.records, "the error says it"


def test_a_rank_that_cannot_judge_ends_all_ranks_with_what_is_done_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """`UnjudgedError` is a `SharedError`: `Job` saves the last finished step."""
    sampler = sampler_of(Ranks(), rounds=1)
    monkeypatch.setattr(sampler.queues.world, "all_gather_object", lambda mine: [None, mine])
    monkeypatch.setattr(sampler.rewards, "score", MagicMock(side_effect=RewardError("a.py has changed")))
    with pytest.raises(UnjudgedError, match=r"^a\.py has changed$"):
        sampler.sample(4)


def test_groups_are_scored_when_their_last_member_has_ended() -> None:
    ranks = Ranks()
    ranks.lengths = [2, 6]
    sampler = sampler_of(ranks, wanted=2, carry_over=3)
    steps = [sampler.sample(4)]
    assert ranks.history == [], "unfinished responses are not remembered"
    ranks.lengths = [2, 3]
    steps += [sampler.sample(4), sampler.sample(4)]
    assert ranks.asked == [[1, 0], [0, 1, 2], [4, 3]], "carried groups first, new ones in the engine's order"
    trained = [[(g.prompt.prompt_id, [len(s.token_ids) for s in g.samples]) for g in groups] for groups, *_ in steps]
    assert trained == [[], [(i, [2, 3]) for i in (0, 1, 2)], [(i, [2, 3]) for i in (4, 3)]], "three groups of two"
    assert all(len(g.rewards) == 2 for groups, *_ in steps for g in groups)
    responses = [s for groups, *_ in steps for g in groups for s in g.samples]
    assert all(type(s.token_ids) is type(s.logprobs) is list for s in responses), "also those that were carried"
    assert [m["carry_over/unfinished"].value for *_, m in steps] == [2, 0, 0]
