"""Metrics and records of environments: turns, their rewards, seconds and failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megatron_tlt.envs.calls import parse_calls
from megatron_tlt.observe.jsonl import JsonRow
from megatron_tlt.observe.reduction import Metric, RankMetrics, Reduce, sums
from megatron_tlt.rollout.stops import stop_end
from megatron_tlt.types import Sample, SampleGroup

_TURNS = 8  # of which the mean reward is a metric
_LIMITS = ("max_turns", "cut")  # finish reasons whose shares are metrics


def turn_metrics(groups: Sequence[SampleGroup]) -> RankMetrics:
    """Of this rank's trajectories; those that were cut in their first turn have no rewards."""
    samples = [sample for group in groups for sample in group.samples]
    rewards = [sample.turn_rewards for sample in samples]
    row = sums({"env/failures": sum(sample.failure is not None for sample in samples)})
    pairs = {"env/turns": (float(sum(map(len, rewards))), len(samples))}
    pairs |= {"env/reward": (sum(map(sum, rewards)), len(samples))}
    pairs |= {"env/seconds": (sum(sum(sample.turn_seconds) for sample in samples), len(samples))}
    for reason in _LIMITS:
        pairs[f"env/{reason}"] = float(sum(sample.finish_reason == reason for sample in samples)), len(samples)
    for turn in range(min(_TURNS, max(map(len, rewards), default=0))):
        there = [of_turn[turn] for of_turn in rewards if len(of_turn) > turn]
        pairs[f"env/reward/turn_{turn + 1}"] = sum(there), len(there)
    return row | {name: Metric(total, Reduce.MEAN, count) for name, (total, count) in pairs.items()}


def turn_rows(
    sample: Sample,
    decode: Callable[[Sequence[int]], str],
    stop: Sequence[str] = (),
    *,
    has_tools: bool,
    in_thought: bool = False,
) -> list[JsonRow]:
    """A row a turn, with the fields that it has: `response`, the text that the policy drew, up to the end of a
    string of `stop`; `calls` in it, of tools; `observation`, the text given behind it; the environment's `reward`, and
    the `seconds` waited for it.
    """
    rows: list[JsonRow] = []
    tokens, begin = sample.token_ids, 0
    for turn, (end, next_begin) in enumerate([*sample.given, (len(tokens), len(tokens))]):
        text = decode(tokens[begin:end])
        row: JsonRow = {"response": text[: stop_end(text, stop)]}
        if has_tools and (calls := parse_calls(row["response"], in_thought)):
            row["calls"] = [
                {"problem": call.problem} if call.problem else {"name": call.name, "arguments": call.arguments}
                for call in calls
            ]
        if next_begin > end:
            row["observation"] = decode(tokens[end:next_begin])
        for name, values in (("reward", sample.turn_rewards), ("seconds", sample.turn_seconds)):
            if turn < len(values):
                row[name] = values[turn]
        rows.append(row)
        begin = next_begin
    return rows


def turn_columns(samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    """`turns`, int64 [n], and `turn_rewards`, float64 [n, turns], NaN where a trajectory had no such turn."""
    rewards = np.full((len(samples), _TURNS), np.nan)
    for row, sample in zip(rewards, samples, strict=True):
        there = sample.turn_rewards[:_TURNS]
        row[: len(there)] = there
    turns = np.array([len(sample.turn_rewards) for sample in samples], np.int64)
    return {"turns": turns, "turn_rewards": rewards}


def column_means(turns: np.ndarray, rewards: np.ndarray) -> dict[str, float]:
    """Means over the rows of `turn_columns`: turns, and the reward of each turn over the rows that had it."""
    values = {"turns": float(turns.mean())}
    for turn, of_turn in enumerate(rewards.T, start=1):
        there = of_turn[~np.isnan(of_turn)]
        if len(there):
            values[f"reward/turn_{turn}"] = float(there.mean())
    return values


def failure_warning(groups: Sequence[SampleGroup]) -> str | None:
    """Counts this rank's trajectories that ended without their environment; None without any."""
    samples = [sample for group in groups for sample in group.samples]
    return unanswered(samples, " and are not trained on; this step is not comparable bit for bit")


def unanswered(samples: Sequence[Sample], consequence: str = "") -> str | None:
    """Counts trajectories that ended without an answer of their environment, and names one; None without any."""
    failed = [sample for sample in samples if sample.failure is not None]
    if not failed:
        return None
    count, first = f"{len(failed)} of {len(samples)}", failed[0]
    which = f"prompt {first.prompt_id}, sample {first.sample_index}"
    return (
        f"{count} trajectories ended without an answer of their environment{consequence}; one of them: {which}: "
        f"{first.failure}"
    )
