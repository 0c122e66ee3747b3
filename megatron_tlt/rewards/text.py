"""Rewards of the text alone: exact match with the reference answer, and a pattern for the whole answer."""

from __future__ import annotations

from megatron_tlt.config.data import RewardConfig
from megatron_tlt.rewards.base import Scorer, compile_pattern, extract_answer, references_of
from megatron_tlt.types import Prompt, Sample


def exact_reward(config: RewardConfig) -> Scorer:
    """1 if the extracted answer is an acceptable one, character by character after stripping; else 0.

    Raises ValueError for a prompt without a reference answer.
    """
    pattern = compile_pattern(config.pattern)

    def score(prompt: Prompt, sample: Sample) -> float:
        answer = extract_answer(pattern, sample.text)
        return float(any(answer == reference.strip() for reference in references_of(prompt)))

    return score


def format_reward(config: RewardConfig) -> Scorer:
    """1 if the whole text matches the pattern, else 0."""
    pattern = compile_pattern(config.pattern)
    assert pattern is not None, "config/checks requires it"
    return lambda _, sample: float(pattern.fullmatch(sample.text) is not None)
