"""Another try after the verifier's word, for prompts of any procedural task or with a reference answer."""

from __future__ import annotations

import re

from megatron_tlt.envs.base import Environment, Step
from megatron_tlt.types import Prompt
from megatron_tlt.workers.answers import last_match
from megatron_tlt.workers.task_verifier import task_score


class Retry(Environment):
    """Says of a wrong answer that it is wrong. The reward is the last answer's score, 0 to 1."""

    def __init__(
        self,
        pattern: str = r"<answer>(.*?)</answer>",
        tries: int = 2,
        threshold: float = 1.0,
        text: str = "That is wrong. Try again.",
    ):
        """`pattern`: finds the answer, group 1 of the last match; `threshold`: score from which it is right."""
        self._pattern, self._tries = re.compile(pattern, re.DOTALL), tries
        self._threshold, self._text = threshold, text
        self._prompt: Prompt | None = None
        self._tried = 0

    def reset(self, prompt: Prompt, seed: int) -> None:
        """Raises ValueError for a prompt by which no answer can be judged."""
        if prompt.answer is None and prompt.metadata.get("task_entry") is None:
            raise ValueError("retry needs a reference answer, or the entry of a procedural task")
        self._prompt, self._tried = prompt, 0

    def step(self, response: str) -> Step:
        assert self._prompt is not None
        self._tried += 1
        answer = last_match(self._pattern, response)
        score = _score(self._prompt, answer) if answer else 0.0
        if score >= self._threshold or self._tried >= self._tries:
            return Step(reward=score, done=True)
        return Step(self._text)


def _score(prompt: Prompt, answer: str) -> float:
    """The task's own score; for a prompt of no task, whether the answer equals an acceptable one."""
    score = task_score(prompt, answer)
    if score is not None:
        return score
    return float(any(answer == reference.strip() for reference in prompt.answers))
