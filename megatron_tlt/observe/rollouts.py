"""Records of a step's rollouts: a row of statistics in run_dir/rollouts.jsonl, responses in samples.jsonl. Torch-free.

A row of rollouts.jsonl has a few kilobytes, whatever the number of ranks:

    step, samples       responses that the step scored
    responses, rewards  digests, which depend neither on the order of samples nor on the rank that generated them
    strategies          decoding steps by strategy, "none" included; where the engine speculates
    drafted_at, accepted_at    rows whose draft reached the position, and that accepted it (first: position 1)
    by_batch            running requests (up to this power of two): [row steps, emitted tokens] of rows with a draft

samples.jsonl has a few responses of every step for people to read. Where speculation is on, a response has its drafts:
`"drafts": {"pieces": the text of each token (of the first ones), "runs": [[position of the first drafted token, how
many were accepted, text of those refused], ...]}`. With an environment `response` is the last drawn turn, and a row has
`given` (spans of the response's tokens), `turn_rewards`, `env_failure` and `turns`, for each turn with the fields that
it has: `response` (drawn), `calls` (of tools), `observation` (given), `reward`, `seconds` (waited for the environment).

responses/rank-00000.jsonl, with `observe.save_responses`, has every response that a rank scored: the fields of
samples.jsonl and the token ids, to train a drafter on (`data/responses.py` reads them).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, zip_longest
from typing import Any

import numpy as np

from megatron_tlt.observe.jsonl import JsonRow
from megatron_tlt.types import EngineStats, RewardResult, Sample, SampleGroup, SpeculationStats

ROLLOUTS_FILE = "rollouts.jsonl"
SAMPLES_FILE = "samples.jsonl"
RESPONSES_DIR = "responses"
_POSITIONS = 32
_MASK = (1 << 64) - 1

DraftsOf = Callable[[Sample], dict[str, Any] | None]
TurnsOf = Callable[[Sample], list[JsonRow]]


def rank_row(stats: EngineStats, groups: Sequence[SampleGroup]) -> JsonRow:
    """One rank's part of a row, to be gathered; digests are still numbers."""
    row: JsonRow = {"samples": sum(len(group.samples) for group in groups)}
    row["responses"], row["rewards"] = digests(groups)
    if stats.speculation.steps_by_strategy:
        row |= _speculation(stats.speculation)
    return row


def digests(groups: Sequence[SampleGroup]) -> tuple[int, int]:
    """Digests of responses and of rewards, 64 bits each: sums, so that ranks' digests add up to the step's."""
    responses = rewards = 0
    for group in groups:
        for sample in group.samples:
            key = f"{sample.prompt_id}/{sample.sample_index}/".encode()
            responses += _hash(key + np.asarray(sample.token_ids, np.int32).tobytes())
        for sample, reward in zip(group.samples, group.rewards, strict=False):
            rewards += _hash(f"{sample.prompt_id}/{sample.sample_index}/{reward.value!r}".encode())
    return responses & _MASK, rewards & _MASK


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _speculation(stats: SpeculationStats) -> JsonRow:
    by_batch: dict[int, list[int]] = {}
    for running, (rows, emitted) in stats.by_batch.items():
        bucket = by_batch.setdefault(bucket_of(running), [0, 0])
        bucket[0] += rows
        bucket[1] += emitted
    return {
        "strategies": dict(stats.steps_by_strategy),
        "drafted_at": stats.drafted_at[:_POSITIONS],
        "accepted_at": stats.accepted_at[:_POSITIONS],
        "by_batch": by_batch,
    }


def bucket_of(running: int) -> int:
    """The power of two that is not below `running` (at least 1): requests are counted together up to it."""
    return 1 << (running - 1).bit_length()


def step_row(ranks: Sequence[JsonRow]) -> JsonRow:
    """The row of a step, from all ranks' `rank_row`."""
    row: JsonRow = {"samples": sum(r["samples"] for r in ranks)}
    for name in ("responses", "rewards"):
        row[name] = f"{sum(r[name] for r in ranks) & _MASK:016x}"
    spec = [r for r in ranks if "strategies" in r]
    if not spec:
        return row
    counts = sum((Counter(r["strategies"]) for r in spec), Counter[str]())
    row["strategies"] = dict(counts.most_common())
    for name in ("drafted_at", "accepted_at"):
        row[name] = column_sums([r[name] for r in spec])
    buckets = sorted({bucket for r in spec for bucket in r["by_batch"]})
    row["by_batch"] = {b: column_sums([r["by_batch"].get(b, [0, 0]) for r in spec]) for b in buckets}
    return row


def column_sums(lists: Sequence[Sequence[int]]) -> list[int]:
    """Sums element by element; shorter lists count as if zeros followed."""
    return [sum(values) for values in zip_longest(*lists, fillvalue=0)]


def sample_rows(
    groups: Sequence[SampleGroup], most: int, drafts_of: DraftsOf | None = None, turns_of: TurnsOf | None = None
) -> list[JsonRow]:
    """The best and the worst response of the first prompts, `most` in all: the update learns from their contrast.

    `drafts_of` returns the drafts of a sample, None where they are not known; `turns_of` the turns of a trajectory.
    """
    rows = []
    pairs = ((group, pair) for group in groups for pair in _best_and_worst(group))
    for group, (sample, reward) in islice(pairs, most):
        drafts = drafts_of(sample) if drafts_of is not None else None
        rows.append(_row(group, sample, reward, turns_of) | ({} if drafts is None else {"drafts": drafts}))
    return rows


def response_rows(groups: Sequence[SampleGroup], turns_of: TurnsOf | None = None) -> Iterator[JsonRow]:
    """Every response, with the token ids of its prompt and its own; `turns_of` as in `sample_rows`."""
    for group in groups:
        for sample, reward in zip(group.samples, group.rewards, strict=True):
            ids: JsonRow = {"prompt_token_ids": group.prompt.token_ids, "token_ids": sample.token_ids}
            yield _row(group, sample, reward, turns_of) | ids | ({"given": sample.given} if sample.given else {})


def _best_and_worst(group: SampleGroup) -> list[tuple[Sample, RewardResult]]:
    scored = sorted(zip(group.samples, group.rewards, strict=True), key=lambda pair: -pair[1].value)
    return scored[:1] + scored[1:][-1:]


def _row(group: SampleGroup, sample: Sample, reward: RewardResult, turns_of: TurnsOf | None) -> JsonRow:
    row: JsonRow = {
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
    if turns_of is not None:
        row |= {"given": sample.given, "turn_rewards": sample.turn_rewards, "env_failure": sample.failure}
        row["turns"] = turns_of(sample)
    return row
