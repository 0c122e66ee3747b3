"""A user's reward function, as the tests' runs use one. Imports nothing heavy: worker processes load it."""

from typing import Any


def reward(prompt: str, answer: str | None, response: str, metadata: dict[str, Any]) -> float:
    """The share of vowels: varies between the answers of a random policy, and can be learned."""
    return sum(c in "aeiou" for c in response) / max(len(response), 1)
