"""The verifier that belongs to a procedural task of `reasoning-gym` (`workers.task_verifier.task_score`)."""

from __future__ import annotations

from megatron_tlt.config.data import RewardConfig
from megatron_tlt.rewards.base import Scorer, compile_pattern, extract_answer
from megatron_tlt.types import Prompt, Sample
from megatron_tlt.workers.task_verifier import task_score


def task_reward(config: RewardConfig) -> Scorer:
    """The task's own score of the extracted answer, 0 to 1; 0 when there is no answer.

    Raises ValueError for a prompt that comes from no task.
    """
    pattern = compile_pattern(config.pattern)

    def score(prompt: Prompt, sample: Sample) -> float:
        value = task_score(prompt, extract_answer(pattern, sample.text))
        if value is None:
            raise ValueError(f"prompt {prompt.dataset_id!r} comes from no procedural task")
        return value

    return score
