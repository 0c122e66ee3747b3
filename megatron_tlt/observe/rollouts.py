"""What a step's rollouts were like, over all ranks: one row a step in run_dir/rollouts.jsonl. Torch-free.

A row has the same few kilobytes whatever the number of ranks:

    step, samples       answers of the step
    lengths, longest    answers by length: 32 equal bins of 0 to `longest` tokens
    answers, rewards    digests, which do not depend on the order of samples nor on who generated them
    strategies          decoding steps by strategy, "none" included; where the engine speculates
    drafted_at, accepted_at    rows whose draft reached the position, and that accepted it (first: position 1)
    by_batch            running requests (up to this power of two): [row steps, emitted tokens] of speculative steps
    draft_seconds, verify_seconds    summed over ranks
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_tlt.observe.jsonl import LineFile, cut_back, to_line
from megatron_tlt.types import EngineStats, SampleGroup, SpeculationStats

ROLLOUTS_FILE = "rollouts.jsonl"
BINS = 32
_POSITIONS = 32
_STRATEGIES = 24
_MASK = (1 << 64) - 1

Figures = dict[str, Any]


class RolloutLog:
    """Writes the rows; on ranks other than 0 it does nothing."""

    def __init__(self, run_dir: str | Path, rank: int, start_step: int = 0):
        """Rows after `start_step` are dropped."""
        self._file: LineFile | None = None
        if rank == 0:
            path = Path(run_dir) / ROLLOUTS_FILE
            cut_back(path, start_step)
            self._file = LineFile(path)

    def log(self, step: int, ranks: Sequence[Figures]) -> None:
        """Writes what the ranks' `own_figures` add up to."""
        if self._file is not None:
            self._file.write([to_line({"step": step, **combined_figures(ranks)})])

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


def own_figures(stats: EngineStats, groups: Sequence[SampleGroup], longest: int) -> Figures:
    """One rank's part of a row, to be gathered: digests are numbers still. `longest`: tokens of the longest answer."""
    lengths = [len(sample.token_ids) for group in groups for sample in group.samples]
    counts, _ = np.histogram(lengths, bins=BINS, range=(0, max(1, longest)))
    figures: Figures = {"samples": len(lengths), "longest": longest, "lengths": counts.tolist()}
    figures["answers"], figures["rewards"] = digests(groups)
    if stats.speculation.steps_by_strategy:
        figures |= _speculation(stats.speculation)
    return figures


def digests(groups: Sequence[SampleGroup]) -> tuple[int, int]:
    """Digests of answers and of rewards, 64 bits each: sums, so that ranks' digests add up to the step's."""
    answers = rewards = 0
    for group in groups:
        for sample in group.samples:
            who = f"{sample.prompt_id}/{sample.sample_index}/".encode()
            answers += _hash(who + np.asarray(sample.token_ids, np.int32).tobytes())
        for sample, reward in zip(group.samples, group.rewards, strict=False):
            rewards += _hash(f"{sample.prompt_id}/{sample.sample_index}/{reward.value!r}".encode())
    return answers & _MASK, rewards & _MASK


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _speculation(stats: SpeculationStats) -> Figures:
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
        "draft_seconds": stats.draft_seconds,
        "verify_seconds": stats.verify_seconds,
    }


def bucket_of(running: int) -> int:
    """The power of two that is not below `running` (at least 1): requests are counted together up to it."""
    return 1 << (running - 1).bit_length()


def combined_figures(ranks: Sequence[Figures]) -> Figures:
    """The row of a step, of all ranks' `own_figures`."""
    row: Figures = {"samples": sum(r["samples"] for r in ranks), "longest": max(r["longest"] for r in ranks)}
    row["lengths"] = _summed([r["lengths"] for r in ranks])
    for name in ("answers", "rewards"):
        row[name] = f"{sum(r[name] for r in ranks) & _MASK:016x}"
    spec = [r for r in ranks if "strategies" in r]
    if not spec:
        return row
    row["strategies"] = _most_used([r["strategies"] for r in spec])
    for name in ("drafted_at", "accepted_at"):
        row[name] = _summed([r[name] for r in spec])
    buckets = sorted({bucket for r in spec for bucket in r["by_batch"]})
    row["by_batch"] = {b: _summed([r["by_batch"].get(b, [0, 0]) for r in spec]) for b in buckets}
    for name in ("draft_seconds", "verify_seconds"):
        row[name] = round(sum(r[name] for r in spec), 6)
    return row


def _summed(lists: Sequence[Sequence[int]]) -> list[int]:
    """Element by element; shorter lists end with zeros."""
    total = [0] * max(map(len, lists), default=0)
    for values in lists:
        for at, value in enumerate(values):
            total[at] += value
    return total


def _most_used(ranks: Sequence[Mapping[str, int]]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for strategies in ranks:
        counts.update(strategies)
    kept = dict(counts.most_common(_STRATEGIES))
    rest = counts.total() - sum(kept.values())
    return kept | ({"other": rest} if rest else {})
