"""Guessing a number: after each guess the environment says in which direction the number lies."""

from __future__ import annotations

import random
import re

from megatron_tlt.envs.base import Environment, Step
from megatron_tlt.types import Prompt
from megatron_tlt.workers.answers import last_match


class NumberGuess(Environment):
    """A number from 1 to `most`, drawn from the seed. Reward 1 for the right guess, whenever it comes."""

    def __init__(self, most: int = 20, pattern: str = r"(-?\d+)"):
        """`pattern`: finds the guess, group 1 of the last match in a turn."""
        self._most, self._pattern = most, re.compile(pattern, re.DOTALL)
        self._number = 0

    def reset(self, prompt: Prompt, seed: int) -> str:
        self._number = random.Random(seed).randint(1, self._most)
        return f"Guess a whole number from 1 to {self._most}."

    def step(self, response: str) -> Step:
        try:
            guess = int(last_match(self._pattern, response) or "")
        except ValueError:
            return Step("That is no number. Guess again.")
        if guess == self._number:
            return Step(reward=1.0, done=True)
        return Step(f"The number is {'higher' if guess < self._number else 'lower'}. Guess again.")
