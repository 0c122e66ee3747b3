"""`retry`, `calculator` and `python` in one run, with answers that come after a while, another one each time."""

from __future__ import annotations

import json
import random
import time
import zlib

from megatron_tlt.envs.base import Environment, Step
from megatron_tlt.envs.calculator import Calculator
from megatron_tlt.envs.python import Python
from megatron_tlt.envs.retry import Retry
from megatron_tlt.envs.tools import ToolEnvironment
from megatron_tlt.types import Prompt


def call(name: str, **arguments: str) -> str:
    """A tool call in Qwen's form."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class LateEnvironments(Environment):
    """The number that is the prompt's answer chooses one of the three. A step takes up to `most_s` seconds, by chance.

    A random policy calls no tool, so its turns become calls here, other ones for other turns.
    """

    def __init__(self, most_s: float):
        self._most_s, self._kind = most_s, 0
        self._all = (Retry(tries=3), ToolEnvironment(Calculator(), "user"), ToolEnvironment(Python(), "user"))

    def reset(self, prompt: Prompt, seed: int) -> str | None:
        self._kind = int(prompt.answer or "") % len(self._all)
        return self._all[self._kind].reset(prompt, seed)

    def step(self, response: str) -> Step:
        time.sleep(random.uniform(0.0, self._most_s))
        number = zlib.crc32(response.encode()) % 1000
        sums, code = f"{number} * 7 / 3", f"print({number}**2)"
        turns = (response, call("calculate", expression=sums), call("python", code=code))
        step = self._all[self._kind].step(turns[self._kind])
        last = step.observation[-1:]  # the tools' rewards depend on their answers
        return step._replace(reward=float(last) / 10) if last.isdigit() else step
