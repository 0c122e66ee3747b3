"""A sum with hints: a wrong result is answered with "too high" or "too low"."""

import random
import re

from megatron_tlt.envs.base import Environment, Step


class SumWithHints(Environment):
    def __init__(self, most: int = 60):
        self.most, self.result = most, 0

    def reset(self, prompt, seed):
        rng = random.Random(seed)  # of the seed, never of the clock: the same prompt for all of its responses
        a, b = rng.randint(1, self.most), rng.randint(1, self.most)
        self.result = a + b
        return f"State the final answer to the following arithmetic problem: {a} + {b} ="

    def step(self, response):
        found = re.findall(r"<answer>\s*(-?\d+)\s*</answer>", response)
        if not found:
            return Step("Write the result as <answer>42</answer>.")
        value = int(found[-1])
        if value == self.result:
            return Step(reward=1.0, done=True)
        return Step("Too low." if value < self.result else "Too high.")
