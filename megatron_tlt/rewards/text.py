"""Rewards of the text alone: exact match with the reference answer, and a pattern for the whole answer."""

from __future__ import annotations

import unicodedata

from megatron_tlt.config.data import RewardConfig
from megatron_tlt.rewards.base import Scorer, compile_pattern, extract_answer, references_of
from megatron_tlt.types import Prompt, Sample


def exact_reward(config: RewardConfig) -> Scorer:
    """1 if the extracted answer is a reference, stripped and in the form NFC, character by character; else 0.

    Raises ValueError for a prompt without a reference answer.
    """
    pattern = compile_pattern(config.pattern)

    def score(prompt: Prompt, sample: Sample) -> float:
        references = [_composed(reference) for reference in references_of(prompt)]
        answer = extract_answer(pattern, sample.text)
        return float(answer is not None and _composed(answer) in references)

    return score


def format_reward(config: RewardConfig) -> Scorer:
    """1 if the whole text matches the pattern, with or without white space at its end; else 0."""
    pattern = compile_pattern(config.pattern)
    assert pattern is not None, "config/checks requires it"

    def score(prompt: Prompt, sample: Sample) -> float:
        texts = (sample.text, sample.text.rstrip())
        return float(any(pattern.fullmatch(text) is not None for text in texts))

    return score


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text.strip())
