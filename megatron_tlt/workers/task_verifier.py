"""Verifiers of the procedural tasks of `reasoning-gym`, for rewards and environments."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import reasoning_gym  # here and not at the first answer, whose time is limited

from megatron_tlt.types import Prompt


def task_score(prompt: Prompt, answer: str | None) -> float | None:
    """The score of `answer`, 0 to 1, by the task that made the prompt, 0 without one; None for a prompt of no task.

    Read of the prompt's metadata: `task_name`, `task_params` and `task_entry` (the generated item).
    """
    entry = prompt.metadata.get("task_entry")
    if entry is None:
        return None
    if not answer:
        return 0.0
    params = json.dumps(prompt.metadata.get("task_params") or {}, sort_keys=True)
    return float(_verifier(prompt.metadata["task_name"], params).score_answer(answer, entry))


@cache
def _verifier(name: str, params: str) -> Any:
    """A dataset object only for its `score_answer`: made once per task, as small as can be."""
    return reasoning_gym.create_dataset(name, seed=0, size=1, **json.loads(params))
