"""Wordle with a small list of words."""

from __future__ import annotations

import random
import re
from collections import Counter

from megatron_tlt.envs.base import Environment, Step
from megatron_tlt.types import Prompt
from megatron_tlt.workers.answers import last_match

WORDS = """
    apple bread brick chair chest clock cloud crane dance dream earth flame flour frost glass grape green
    horse house knife light lemon metal money mouse music night ocean paint paper pearl piano plant plate
    queen quiet river robot salad scale sheep shirt sleep smile snake spoon stone storm sugar table tiger
    toast torch tower train truck water wheat wheel world
""".split()  # noqa: SIM905


class Wordle(Environment):
    """A word of five letters, drawn from the seed. Reward 1 for the word; the last turn's right letters / 5 else."""

    def __init__(self, tries: int = 6, pattern: str = r"\b([A-Za-z]{5})\b"):
        """`pattern`: finds the guess, group 1 of the last match in a turn."""
        self._tries, self._pattern = tries, re.compile(pattern)
        self._word, self._tried = "", 0

    def reset(self, prompt: Prompt, seed: int) -> str:
        self._word, self._tried = random.Random(seed).choice(WORDS), 0
        return (
            "Guess an English word of five letters. Each letter of a guess is answered: G right letter and place, "
            "Y letter elsewhere in the word, - not in the word."
        )

    def step(self, response: str) -> Step:
        self._tried += 1
        word = (last_match(self._pattern, response) or "").lower()
        word = word if len(word) == len(self._word) else ""  # a pattern of one's own may take other words
        marks = clue(word, self._word) if word else ""
        if marks == "GGGGG" or self._tried >= self._tries:
            return Step(reward=marks.count("G") / len(self._word), done=True)
        return Step(f"{word}: {marks}" if word else "That is no word of five letters.")


def clue(guess: str, word: str) -> str:
    """G, Y or - for each letter of the guess; a letter has as many marks as the word has of it, G first."""
    left = Counter(w for g, w in zip(guess, word, strict=True) if g != w)
    marks = ""
    for g, w in zip(guess, word, strict=True):
        if g == w:
            marks += "G"
        elif left[g] > 0:
            left[g] -= 1
            marks += "Y"
        else:
            marks += "-"
    return marks
