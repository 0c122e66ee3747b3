"""Reward functions as users write them, for the tests' runs. Imports nothing heavy: worker processes load it."""

import os
import time
from typing import Any


def vowels(prompt: str, answer: str | None, response: str, metadata: dict[str, Any]) -> float:
    """The share of vowels: varies between the answers of a random policy, and can be learned."""
    return sum(c in "aeiou" for c in response) / max(len(response), 1)


def slow_vowels(prompt: str, answer: str | None, response: str, metadata: dict[str, Any]) -> float:
    """`vowels` after SLOW_REWARD_S seconds, so that a test can do something meanwhile."""
    time.sleep(float(os.environ.get("SLOW_REWARD_S", "0")))
    return vowels(prompt, answer, response, metadata)


def bad(prompt: str, answer: str, response: str, metadata: dict[str, object]) -> float:
    """By the number in the answer: raises, hangs, takes 10 GB, ends the process, or counts letters."""
    kind = int(answer) % 6
    if kind == 1:
        raise RuntimeError("no such luck")
    if kind == 2:
        time.sleep(3600)
    if kind == 3:
        return float(len(bytearray(10 << 30)))
    if kind == 4:
        os._exit(7)
    return len(set(response)) / 100
