"""The verifier that belongs to a procedural task of `reasoning-gym`.

The prompt has its inputs: metadata `task_name`, `task_params` and `task_entry` (the generated item).
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import reasoning_gym

from megatron_tlt.config.data import RewardConfig
from megatron_tlt.rewards.base import Scorer, compile_pattern, extract_answer
from megatron_tlt.types import Prompt, Sample


def task_reward(config: RewardConfig) -> Scorer:
    """The task's own score of the extracted answer, 0 to 1; 0 when there is no answer.

    Raises ValueError for a prompt that comes from no task.
    """
    pattern = compile_pattern(config.pattern)

    def score(prompt: Prompt, sample: Sample) -> float:
        entry = prompt.metadata.get("task_entry")
        if entry is None:
            raise ValueError(f"prompt {prompt.dataset_id!r} comes from no procedural task")
        answer = extract_answer(pattern, sample.text)
        if not answer:
            return 0.0
        params = json.dumps(prompt.metadata.get("task_params") or {}, sort_keys=True, default=str)
        return float(_verifier(prompt.metadata["task_name"], params).score_answer(answer, entry))

    return score


@cache
def _verifier(name: str, params: str) -> Any:
    """A dataset object only for its `score_answer`: made once per task, as small as can be."""
    return reasoning_gym.create_dataset(name, seed=0, size=1, **json.loads(params))
