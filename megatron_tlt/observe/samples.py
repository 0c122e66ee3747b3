"""A few answers of every step in run_dir/samples.jsonl, for people to read. Torch-free.

Where speculation is on, an answer has its drafts: `"drafts": {"pieces": the text of each token (of the first ones),
"runs": [[position of the first drafted token, how many were accepted, text of those refused], ...]}`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from megatron_tlt.observe.jsonl import Row
from megatron_tlt.types import RewardResult, Sample, SampleGroup

SAMPLES_FILE = "samples.jsonl"

DraftsOf = Callable[[Sample], dict[str, Any] | None]


def sample_rows(groups: Sequence[SampleGroup], most: int, drafts_of: DraftsOf | None = None) -> list[Row]:
    """The best and the worst answer of the first prompts, `most` in all: the update learns from their contrast.

    `drafts_of` returns the drafts of a sample, None where they are not known.
    """
    rows = []
    pairs = ((group, pair) for group in groups for pair in _best_and_worst(group))
    for group, (sample, reward) in islice(pairs, most):
        drafts = drafts_of(sample) if drafts_of is not None else None
        rows.append(_row(group, sample, reward) | ({} if drafts is None else {"drafts": drafts}))
    return rows


def _best_and_worst(group: SampleGroup) -> list[tuple[Sample, RewardResult]]:
    scored = sorted(zip(group.samples, group.rewards, strict=True), key=lambda pair: -pair[1].value)
    return scored[:1] + scored[1:][-1:]


def _row(group: SampleGroup, sample: Sample, reward: RewardResult) -> Row:
    row: Row = {
        "prompt_id": sample.prompt_id,
        "sample_index": sample.sample_index,
        "task": group.prompt.task,
        "dataset_id": group.prompt.dataset_id,
        "prompt": group.prompt.text,
        "answer": group.prompt.answer,
        "response": sample.text,
        "tokens": len(sample.token_ids),
        "finish_reason": sample.finish_reason,
        "policy_version": sample.policy_version,
        "reward": reward.value,
        "correct": reward.correct,
    }
    if reward.parts:
        row["parts"] = reward.parts
    if reward.failure is not None:
        row["failure"] = reward.failure
    return row
