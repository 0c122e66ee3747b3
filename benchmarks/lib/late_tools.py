"""An environment of `proof_agents.py`: a built-in one whose answers come after a while, another one each time."""

from __future__ import annotations

import random
import time

from megatron_tlt.config.env import EnvKind, EnvSection
from megatron_tlt.envs.base import Environment, Step
from megatron_tlt.envs.build import load_environment
from megatron_tlt.types import Prompt


class Late(Environment):
    """Each step takes up to `most_s` seconds, by chance."""

    def __init__(self, kind: EnvKind, most_s: float):
        self._most_s = most_s
        self._inner = load_environment(EnvSection(kind=kind, tool_role="user"))()

    def reset(self, prompt: Prompt, seed: int) -> str | None:
        return self._inner.reset(prompt, seed)

    def step(self, response: str) -> Step:
        time.sleep(random.uniform(0.0, self._most_s))
        return self._inner.step(response)

    def close(self) -> None:
        self._inner.close()
