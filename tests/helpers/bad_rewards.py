"""A reward that goes wrong in its own way for each prompt, for tests with real runs."""

import os
import time


def reward(prompt: str, answer: str, response: str, metadata: dict[str, object]) -> float:
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
