"""The reward of `vowels` after a while: steps that take seconds, so that a test can do something meanwhile."""

import os
import time
from typing import Any

from tests.helpers import vowels


def reward(prompt: str, answer: str | None, response: str, metadata: dict[str, Any]) -> float:
    """Takes SLOW_REWARD_S seconds."""
    time.sleep(float(os.environ.get("SLOW_REWARD_S", "0")))
    return vowels.reward(prompt, answer, response, metadata)
