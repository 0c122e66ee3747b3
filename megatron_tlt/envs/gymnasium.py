"""Environments with the methods of Gymnasium and gem, as they are."""

from __future__ import annotations

import inspect
from typing import Any

from megatron_tlt.envs.base import Environment, Step
from megatron_tlt.types import Prompt


class GymnasiumEnvironment(Environment):
    """`reset(seed=...) -> (observation, info)`, `step(text)` -> (observation, reward, terminated, truncated, info).

    Observations become texts by `str`. A `reset` that takes `options` gets the prompt there, as {"prompt", "answer",
    "metadata"}; several acceptable answers are a list.
    """

    def __init__(self, environment: Any):
        self._environment = environment

    def reset(self, prompt: Prompt, seed: int) -> str | None:
        answer = [*prompt.answer] if isinstance(prompt.answer, tuple) else prompt.answer
        options = {"prompt": prompt.text, "answer": answer, "metadata": prompt.metadata}
        takes = "options" in inspect.signature(self._environment.reset).parameters
        observation, _ = self._environment.reset(seed=seed, **({"options": options} if takes else {}))
        return None if observation is None else str(observation)

    def step(self, response: str) -> Step:
        observation, reward, terminated, truncated, _ = self._environment.step(response)
        return Step("" if observation is None else str(observation), float(reward), bool(terminated or truncated))

    def close(self) -> None:
        if hasattr(self._environment, "close"):
            self._environment.close()
