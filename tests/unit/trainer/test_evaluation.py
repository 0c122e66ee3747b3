import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_tlt.config.run import EvalSection
from megatron_tlt.errors import UnjudgedError
from megatron_tlt.trainer.evaluation import Evaluator, pass_at_k, summarise
from megatron_tlt.trainer.turn_metrics import turn_columns
from megatron_tlt.types import Prompt, RewardResult, Sample, SamplingParams


@pytest.mark.parametrize(("correct", "total", "k"), [(0, 4, 2), (1, 4, 1), (1, 4, 2), (3, 6, 4), (6, 6, 3)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_response(correct, total, k):
    responses = [True] * correct + [False] * (total - correct)
    subsets = list(itertools.combinations(responses, k))
    assert pass_at_k(correct, total, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def columns(right_by_prompt):
    rows = [(p, c) for p, responses in enumerate(right_by_prompt) for c in responses]
    prompt, correct = map(np.array, zip(*rows, strict=True))
    length = np.arange(1, len(rows) + 1, dtype=float)
    cut = np.zeros(len(rows))
    return {
        "prompt": prompt,
        "first": prompt,
        "correct": correct,
        "reward": correct.astype(float),
        "length": length,
        "cut": cut,
        "failed": cut,
    }


def test_summary_means_errors_and_powers_of_two():
    result = summarise(5, columns([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]))
    share = np.array([0.25, 1.0, 0.0])
    assert result.pass_at["1"] == pytest.approx(share.mean())
    assert result.stderr == pytest.approx(share.std(ddof=1) / math.sqrt(3))
    assert set(result.pass_at) == {"1", "2", "4"}
    assert result.pass_at["4"] == pytest.approx(2 / 3)


def test_the_order_in_which_ranks_deliver_changes_no_bit():
    rows = columns(np.random.default_rng(0).integers(0, 2, (50, 4)).tolist())
    rows["reward"] = np.random.default_rng(1).random(200)
    rows["first"] = rows["prompt"] // 2
    split = np.concatenate([np.flatnonzero(rows["prompt"] % 3 == rank) for rank in range(3)])
    assert summarise(1, {name: values[split] for name, values in rows.items()}) == summarise(1, rows)


def test_turns_and_their_rewards_are_means_over_the_trajectories_that_had_them():
    rewards = [[1.0], [0.0, 1.0], [0.0, 0.5], []]
    samples = [Sample(0, i, [1], [0.0], "", "env", 0, turn_rewards=of_turn) for i, of_turn in enumerate(rewards)]
    found = summarise(1, columns([[1, 1], [0, 0]]) | turn_columns(samples))
    assert found.env == {"turns": 1.25, "reward/turn_1": pytest.approx(1 / 3), "reward/turn_2": 0.75}
    assert found.metrics()["eval/env/reward/turn_2"] == 0.75


def evaluator_of(failed, judged_elsewhere=0, answers=(None, None), section=None):
    """Of two prompts with two responses each, of which the first `failed` are not judged; beside another rank."""
    both = lambda mine: [mine, (judged_elsewhere, None)] if isinstance(mine, tuple) else [mine]  # noqa: E731
    world = SimpleNamespace(
        rank=0, size=1, wait_for_all=lambda: None, all_gather_object=both, broadcast_object=lambda value, _: value
    )

    def generate(call):
        return [Sample(i, j, [1], [0.0], "", "stop", 0) for i in range(2) for j in range(call.num_samples)]

    def score(groups):
        for group in groups:
            names = [2 * s.prompt_id + s.sample_index for s in group.samples]
            unjudged, right = RewardResult(0.0, False, {}, "no judge"), RewardResult(1.0, True)
            group.rewards = [unjudged if i < failed else right for i in names]
        return "some failed" if failed else None

    opened = lambda prompts, _: SimpleNamespace(fetched=list(prompts))  # noqa: E731
    queues = SimpleNamespace(world=world, tp=1, is_first=True, open=opened)
    backend = SimpleNamespace(ordered=list, generate=generate, history_responses=0, remember=lambda _: None)
    prompts = [Prompt(i, f"q{i}", (1,), "", answer) for i, answer in enumerate(answers)]
    section = section or EvalSection(samples_per_prompt=2)
    rewards = SimpleNamespace(score=score)
    params = SamplingParams(max_tokens=4, seed=0, top_p=0.9, top_k=7)
    return Evaluator(prompts, section, params, backend, rewards, queues)


def test_an_evaluation_counts_what_was_not_judged_and_ends_where_nothing_was(caplog):
    result = evaluator_of(failed=3).run(5)
    assert (result.failures, result.pass_at["1"], result.metrics()["eval/failures"]) == (3, 0.25, 3.0)
    assert caplog.messages == ["some failed"]
    assert evaluator_of(failed=4, judged_elsewhere=1).run(5).failures == 4
    with pytest.raises(UnjudgedError, match=r"^evaluation at step 5: no response .* has a reward; .*: no judge"):
        evaluator_of(failed=4).run(5)
    caplog.clear()
    evaluator = evaluator_of(failed=0)
    generate = evaluator._backend.generate
    evaluator._backend.generate = lambda call: [replace(s, failure="no answer") for s in generate(call)]
    evaluator.run(5)
    assert "4 of 4 trajectories ended without an answer of their environment; one of them" in caplog.text


def test_responses_to_held_out_prompts_are_remembered():
    """Whatever their source: each evaluation has the same ones."""
    evaluator, kept = evaluator_of(failed=0), []
    evaluator._backend.remember = kept.extend
    evaluator.run(5)
    assert [response.dataset_id for response in kept] == ["q0", "q0", "q1", "q1"]


@pytest.mark.parametrize(
    ("answers", "num_prompts", "pass_at"),
    [
        (("5", "5"), 1, {"1": 0.25, "2": 0.5, "4": 1.0}),  # one problem with four responses, of which one is right
        (("5", "6"), 2, {"1": 0.25, "2": 0.5}),
        ((None, None), 2, {"1": 0.25, "2": 0.5}),
    ],
)
def test_rows_with_the_same_prompt_and_answer_are_one_prompt(answers, num_prompts, pass_at):
    result = evaluator_of(failed=3, answers=answers).run(5)
    assert (result.num_prompts, result.pass_at) == (num_prompts, pytest.approx(pass_at))
    assert math.isnan(result.stderr) == (num_prompts == 1)


def test_the_fingerprint_is_of_rows_and_not_of_an_environments_texts():
    def fingerprint(*prompts):
        return Evaluator(prompts, EvalSection(), SamplingParams(), None, None, SimpleNamespace(world=None)).fingerprint

    row = Prompt(0, "q", (1, 2), "row", "5")
    assert fingerprint(row) == fingerprint(replace(row, dataset_id="elsewhere"))
    others = (row, row), (replace(row, answer="6"),), (replace(row, token_ids=(1,)),)
    assert len({fingerprint(*rows) for rows in ((row,), *others)}) == 4
    opened = [replace(row, token_ids=(1, 2, i), text=f"row {i}", row_text="row") for i in (3, 4)]
    assert fingerprint(opened[0]) == fingerprint(opened[1])


def test_masks_of_an_evaluation_are_the_rollouts_unless_it_has_its_own():
    of_eval = [EvalSection(), EvalSection(top_p=0.7, top_k=0, min_p=0.1)]
    taken = [evaluator_of(failed=0, section=section).params for section in of_eval]
    assert [(p.top_p, p.top_k, p.min_p) for p in taken] == [(0.9, 7, 0.0), (0.7, 0, 0.1)]
