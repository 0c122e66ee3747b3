"""Groups that are carried over: new prompts beside them, which groups are trained, metrics, restoring them."""

from __future__ import annotations

from array import array
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.checkpoint.carried_file import carried_writer, read_carried
from megatron_tlt.config.rollout import RolloutSection
from megatron_tlt.errors import CheckpointError
from megatron_tlt.observe.reduction import values_of
from megatron_tlt.trainer.carry_over import CarriedGroups
from megatron_tlt.types import FinishReason, Prompt, Sample, SampleGroup

SAMPLES = 3


class Ranks:
    """One of two ranks: `other` is what the other one gathers."""

    is_main = True

    def __init__(self) -> None:
        self.other: list[SampleGroup] = []

    def all_gather_object(self, has_any: bool) -> list[bool]:
        return [has_any, bool(self.other)]

    def broadcast_object(self, mine: Any, source: int) -> Any:
        return (mine, self.other)[source]


class Stream:
    """Prompts by their id, all of one row of text."""

    def __init__(self, text: str = "q") -> None:
        self.text, self.at = text, 0

    def next_batch(self, count: int) -> list[Prompt]:
        self.at += count
        return [Prompt(i, f"{i}", (1, i), self.text, answer=self.text) for i in range(self.at - count, self.at)]

    def state_dict(self) -> dict[str, int]:
        return {"next_id": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["next_id"]


def carried_groups(stream: Stream, **settings: Any) -> tuple[CarriedGroups, Ranks]:
    ranks = Ranks()
    rollout = RolloutSection(**{"samples_per_prompt": SAMPLES, "carry_over": 4} | settings)
    return CarriedGroups(ranks, stream, rollout), ranks  # type: ignore[arg-type]


def group(
    prompt: Prompt, *ends: FinishReason, version: int = 0, earlier: tuple[tuple[int, int], ...] = ()
) -> SampleGroup:
    length = sum(count for _, count in earlier) + 2
    samples = [
        Sample(prompt.prompt_id, i, [5] * length, [-0.125] * length, f"a {end}", end, version, earlier=earlier)
        for i, end in enumerate(ends)
    ]
    return SampleGroup(prompt, samples)


def test_a_step_has_as_many_new_groups_as_fit_and_trains_the_complete_ones() -> None:
    carried, ranks = carried_groups(Stream())
    prompts = carried.next_prompts(4)
    assert [p.prompt_id for p in prompts] == [0, 1, 2, 3]
    ranks.other = [group(prompts[1], "carry", "carry", "carry")]
    mine = [group(prompts[3], "stop", "length", "carry"), group(prompts[2], "stop", "stop", "length")]
    assert carried.take(mine) == [mine[1]]
    assert [g.prompt for g in carried.groups] == [prompts[1], prompts[3]], "of all ranks, by prompt"
    assert [s.unpacked() for s in carried.groups[1].samples] == mine[0].samples
    for sample in carried.groups[1].samples:  # every rank holds all: lists would be gigabytes
        assert (sample.token_ids, sample.logprobs) == (array("i", [5, 5]), array("f", [-0.125, -0.125]))
    begun, waiting = carried.responses()
    assert set(begun) == {(1, 0), (1, 1), (1, 2), (3, 2)} and set(waiting) == {(3, 0), (3, 1)}
    assert [p.prompt_id for p in carried.next_prompts(4)] == [4, 5], "12 responses, of which 4 are carried"
    assert carried.next_prompts(1) == []


def test_metrics_count_carried_groups_once_and_tokens_of_all_ranks() -> None:
    rows = []
    for is_main in (True, False):
        carried, ranks = carried_groups(Stream())
        prompts, ranks.is_main = carried.next_prompts(3), is_main
        carried.take([group(prompts[0], "stop", "carry", "carry")])
        trained = [group(prompts[1], "stop", "stop", "stop", version=6, earlier=((4, 3), (5, 1)))] if is_main else []
        trained += [group(prompts[2], "stop", "stop", "stop", version=5)]
        rows.append(carried.metrics(trained, version=6))
    ages = 3 * [2, 2, 2, 1, 0, 0] + 6 * [1, 1]
    counts = {"new_prompts": 3, "waiting_groups": 1, "unfinished": 2, "waiting_responses": 1, "token_age_max": 2}
    assert values_of(rows) == {f"carry_over/{name}": value for name, value in counts.items()} | {
        "carry_over/token_age": pytest.approx(sum(ages) / len(ages)),
        "carry_over/off_policy": pytest.approx(sum(age > 0 for age in ages) / len(ages)),
    }
    assert carried_groups(Stream(), carry_over=None)[0].metrics(trained, 6) == {}


def saved(tmp_path: Path) -> tuple[CarriedGroups, Path, Any]:
    """Groups of the prompts 1, 4 and 5 are carried, the stream is at 7; with their file and position."""
    stream = Stream()
    carried, _ = carried_groups(stream)
    first, second = carried.next_prompts(3), carried.next_prompts(4)
    older = group(first[1], "stop", "carry", "carry", version=3, earlier=((0, 4), (2, 4)))
    carried.take([group(second[2], "carry", "carry", "stop"), older, group(second[1], "carry", "stop", "stop")])
    carried_writer(carried.groups)(tmp_path / "carried.jsonl")
    return carried, tmp_path / "carried.jsonl", (carried.oldest_position, stream.state_dict())


def test_a_checkpoint_restores_them_with_prompts_that_the_stream_draws_again(tmp_path: Path) -> None:
    before, file, (position, here) = saved(tmp_path)
    assert position == {"next_id": 0}
    stream = Stream()
    stream.load_state_dict(here)
    carried, _ = carried_groups(stream)
    carried.load(read_carried(file), position)
    assert carried.groups == before.groups and [g.prompt.prompt_id for g in carried.groups] == [1, 4, 5]
    assert [p.prompt_id for p in carried.next_prompts(4)] == [7, 8], "the stream is where it was"
    moved = Stream()
    moved.next_batch = lambda count: [Stream().next_batch(count), moved.load_state_dict({"next_id": 99})][0]  # type: ignore[method-assign, func-returns-value]
    moved.load_state_dict(here)
    carried_groups(moved)[0].load(read_carried(file), position)
    assert moved.state_dict() == here, "also where other limits of prompts drop other rows"
    carried.take(carried.groups[1:])
    assert carried.oldest_position == position, "saved again before the step ends"
    carried.load([], None)
    assert carried.groups == [] and carried.oldest_position is None


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("other", {}, "belong to other prompts"),
        ("q", {"samples_per_prompt": 4}, "groups of 3 .*samples_per_prompt is 4"),
        ("q", {"carry_over": None}, "rollout.carry_over is null"),
        ("q", {"max_tokens": 10}, "unfinished response of 10 tokens, rollout.max_tokens is 10"),
        ("q", {"stop": ("x", "a c")}, "unfinished response with 'a c', which rollout.stop now has"),
    ],
)
def test_other_prompts_and_sizes_are_refused(tmp_path: Path, text: str, settings: Any, message: str) -> None:
    _, file, (position, here) = saved(tmp_path)
    stream = Stream(text)
    stream.load_state_dict(here)
    carried, _ = carried_groups(stream, **settings)
    with pytest.raises(CheckpointError, match=message):
        carried.load(read_carried(file), position)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_carried(file.with_name("none"))


def test_responses_of_an_engine_without_log_probs_go_on_in_such_a_one_only(tmp_path: Path) -> None:
    _, file, (position, here) = saved(tmp_path)
    responses = [(replace(sample, logprobs=[]), crc) for sample, crc in read_carried(file)]
    for backend in ("vllm", "embedded"):
        stream = Stream()
        stream.load_state_dict(here)
        carried, _ = carried_groups(stream, backend=backend)
        with nullcontext() if backend == "vllm" else pytest.raises(CheckpointError, match="without log-probs"):
            carried.load(responses, position)
