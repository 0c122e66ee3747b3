"""Environments with the methods of Gymnasium and gem, as they are."""

from __future__ import annotations

import inspect
from typing import Any

from megatron_tlt.envs.base import Environment, NoTextError, Step, as_flag, kind_without_text
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
        value = self._environment.reset(seed=seed, **({"options": options} if takes else {}))
        observation, _ = _values(value, "reset", "observation, info")
        return None if observation is None else _text(observation)

    def step(self, response: str) -> Step:
        value = self._environment.step(response)
        form = "observation, reward, terminated, truncated, info"
        observation, reward, terminated, truncated, _ = _values(value, "step", form)
        ended, cut = as_flag(terminated, "terminated"), as_flag(truncated, "truncated")
        return Step(_text(observation), reward, ended or cut, truncated=cut and not ended)

    def close(self) -> None:
        if hasattr(self._environment, "close"):
            self._environment.close()


def _values(value: object, method: str, form: str) -> tuple[Any, ...]:
    """A method's values. Raises TypeError for another number of them, as older interfaces have."""
    if not isinstance(value, tuple) or len(value) != form.count(",") + 1:
        what = f"{len(value)} values" if isinstance(value, tuple) else f"a {type(value).__name__}"
        raise TypeError(f"{method} returned {what}, {value!r:.80}: must be ({form})")
    return value


def _text(observation: object) -> str:
    if (kind := kind_without_text(observation)) is not None:
        raise NoTextError(f"an observation of type {kind}: must be a text, or a value with one")
    return "" if observation is None else str(observation)
