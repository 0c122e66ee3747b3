"""The environment of bench_agents.py: a sum with hints, whose `step` takes as long as a tool of that latency."""

from __future__ import annotations

import random
import re
import time

from megatron_tlt.envs.base import Environment, Step
from megatron_tlt.types import Prompt


class SlowHints(Environment):
    """Up to three tries at a sum of two numbers; a wrong one is answered with "Too low." or "Too high."."""

    def __init__(self, latency_s: float):
        """`latency_s`: seconds of each step."""
        self._latency_s, self._result = latency_s, 0

    def reset(self, prompt: Prompt, seed: int) -> str:
        rng = random.Random(seed)
        terms = [rng.randint(1, 60) for _ in range(2)]
        self._result = sum(terms)
        return f"State the final answer to the following arithmetic problem: {terms[0]} + {terms[1]} ="

    def step(self, response: str) -> Step:
        time.sleep(self._latency_s)
        found = re.findall(r"<answer>\s*(-?\d+)\s*</answer>", response)
        if not found:
            return Step("Write the result as <answer>42</answer>.")
        value = int(found[-1])
        if value == self._result:
            return Step(reward=1.0, done=True)
        return Step("Too low." if value < self._result else "Too high.")
