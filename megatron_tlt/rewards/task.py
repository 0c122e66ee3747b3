"""The verifier that belongs to a procedural task of `reasoning-gym`.

The prompt carries what it takes: metadata `task_name`, `task_params` and `task_entry` (the generated item).
"""

from __future__ import annotations

import json
from typing import Any

import reasoning_gym

from megatron_tlt.config.data import RewardConfig
from megatron_tlt.rewards.base import compile_pattern, extract_answer
from megatron_tlt.types import Prompt, Sample


class TaskReward:
    """The task's own score of the extracted answer, 0 to 1; 0 when there is no answer."""

    def __init__(self, config: RewardConfig):
        self._pattern = compile_pattern(config.pattern)
        self._verifiers: dict[tuple[str, str], Any] = {}

    def __call__(self, prompt: Prompt, sample: Sample) -> float:
        """Raises ValueError for a prompt that comes from no task."""
        entry = prompt.metadata.get("task_entry")
        if entry is None:
            raise ValueError(f"prompt {prompt.dataset_id!r} comes from no procedural task")
        answer = extract_answer(self._pattern, sample.text)
        if not answer:
            return 0.0
        verifier = self._verifier(prompt.metadata["task_name"], prompt.metadata.get("task_params") or {})
        return float(verifier.score_answer(answer, entry))

    def _verifier(self, name: str, params: dict[str, Any]) -> Any:
        """A dataset object only for its `score_answer`: made once per task, as small as can be."""
        key = name, json.dumps(params, sort_keys=True, default=str)
        if key not in self._verifiers:
            self._verifiers[key] = reasoning_gym.create_dataset(name, seed=0, size=1, **params)
        return self._verifiers[key]
