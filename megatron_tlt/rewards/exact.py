"""Exact match with the reference answer."""

from __future__ import annotations

from megatron_tlt.config.data import RewardConfig
from megatron_tlt.rewards.base import compile_pattern, extract_answer, reference_of
from megatron_tlt.types import Prompt, Sample


class ExactReward:
    """1 if the extracted answer is the reference, character by character after stripping; else 0."""

    def __init__(self, config: RewardConfig):
        self._pattern = compile_pattern(config.pattern)

    def __call__(self, prompt: Prompt, sample: Sample) -> float:
        """Raises ValueError for a prompt without a reference answer."""
        return float(extract_answer(self._pattern, sample.text) == reference_of(prompt).strip())
