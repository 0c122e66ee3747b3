"""The row that a step's rollouts leave, compared with what is counted by hand."""

from __future__ import annotations

import random

from megatron_tlt.observe.rollouts import digests, rank_row, step_row
from megatron_tlt.types import EngineStats, Prompt, RewardResult, Sample, SampleGroup, SpeculationStats


def group(prompt_id: int, responses: list[list[int]], rewards: list[float]) -> SampleGroup:
    prompt = Prompt(prompt_id=prompt_id, dataset_id="", text="", token_ids=[1])
    samples = [Sample(prompt_id, i, tokens, [], "", "stop", 0) for i, tokens in enumerate(responses)]
    return SampleGroup(prompt, samples, [RewardResult(value, value > 0) for value in rewards])


def some_groups(count: int = 6) -> list[SampleGroup]:
    draw = random.Random(4)
    return [
        group(i, [[draw.randrange(99) for _ in range(draw.randrange(1, 90))] for _ in range(3)], [0.0, 1.0, 0.25])
        for i in range(count)
    ]


def test_digests_add_up_over_any_split_and_order():
    groups = some_groups()
    whole = step_row([rank_row(EngineStats(), groups)])
    for split in (1, 2, 5):
        parts = [groups[split:], groups[:split]]
        row = step_row([rank_row(EngineStats(), part[::-1]) for part in parts])
        assert (row["responses"], row["rewards"]) == (whole["responses"], whole["rewards"])
        assert row["samples"] == 18


def test_digests_see_every_token_reward_and_place():
    groups = some_groups()
    responses, rewards = digests(groups)
    groups[3].samples[1].token_ids[0] += 1
    changed = digests(groups)
    assert changed[0] != responses and changed[1] == rewards
    groups[3].samples[1].token_ids[0] -= 1
    groups[2].rewards[0].value = 0.5
    assert digests(groups)[0] == responses and digests(groups)[1] != rewards
    groups[2].rewards[0].value = 0.0
    one, two = groups[0].samples[:2]
    one.token_ids, two.token_ids = two.token_ids, one.token_ids
    assert digests(groups)[0] != responses


def test_speculation_is_summed_over_ranks():
    stats = [
        SpeculationStats({"none": 3, "a_1": 2}, drafted_at=[5, 4], accepted_at=[3], by_batch={3: [3, 7], 4: [4, 5]}),
        SpeculationStats({"a_1": 5}, drafted_at=[1, 1, 1], accepted_at=[1, 1], by_batch={1: [9, 20]}),
    ]
    row = step_row([rank_row(EngineStats(speculation=s), []) for s in stats])
    assert row["strategies"] == {"a_1": 7, "none": 3}
    assert row["drafted_at"] == [6, 5, 1] and row["accepted_at"] == [4, 1]
    assert row["by_batch"] == {1: [9, 20], 4: [7, 12]}
