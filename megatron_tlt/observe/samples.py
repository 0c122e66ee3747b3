"""A few answers of every step in run_dir/samples.jsonl, to read what the policy really says. Torch-free.

Where speculation is on, an answer comes with what was drafted for it: `"drafts": {"pieces": the text of each token (of
the first ones), "runs": [[position of the first drafted token, how many were accepted, text of those refused], ...]}`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_tlt.observe.jsonl import LineFile, cut_back, to_line
from megatron_tlt.types import RewardResult, Sample, SampleGroup

SAMPLES_FILE = "samples.jsonl"

DraftsOf = Callable[[Sample], dict[str, Any] | None]


class SampleLog:
    """Writes `per_step` answers of each step; on ranks other than 0, or with 0 a step, it does nothing."""

    def __init__(self, run_dir: str | Path, per_step: int, rank: int, start_step: int = 0):
        self.drafts_of: DraftsOf | None = None  # what was drafted for a sample, where it is known
        self.per_step = per_step if rank == 0 else 0
        self._file: LineFile | None = None
        if self.per_step:
            path = Path(run_dir) / SAMPLES_FILE
            cut_back(path, start_step)
            self._file = LineFile(path)

    def log(self, step: int, groups: Sequence[SampleGroup]) -> None:
        """Writes the best and the worst answer of the first prompts: the update learns from their contrast."""
        if self._file is None:
            return
        rows = []
        for group, sample, reward in _choose(groups):
            row = _row(step, group, sample, reward)
            drafts = self.drafts_of(sample) if self.drafts_of is not None else None
            rows.append(to_line(row if drafts is None else {**row, "drafts": drafts}))
            if len(rows) == self.per_step:
                break
        self._file.write(rows)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


def _choose(groups: Sequence[SampleGroup]) -> Iterator[tuple[SampleGroup, Sample, RewardResult]]:
    for group in groups:
        scored = sorted(zip(group.samples, group.rewards, strict=True), key=lambda pair: -pair[1].value)
        if not scored:
            continue
        yield (group, *scored[0])
        if len(scored) > 1:
            yield (group, *scored[-1])


def _row(step: int, group: SampleGroup, sample: Sample, reward: RewardResult) -> dict[str, Any]:
    row: dict[str, Any] = {
        "step": step,
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
